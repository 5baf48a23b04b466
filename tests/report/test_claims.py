"""docs/claims.md has a row for every claim, and its status comes from records alone."""

import json
from pathlib import Path

import pytest

from k3 import UserError
from k3.report import claims

DOCS = Path(__file__).parents[2] / "docs"


def record(folder: Path, **result: object) -> Path:
    path = folder / "qb" / "record.json"
    path.parent.mkdir(parents=True)
    content = {
        "name": "qb",
        "date": "2026-12-01",
        "commit": "abc1234",
        "hardware": "2 CPU cores",
        "command": "python bench/bench_qb.py",
        "seeds": [0],
        "results": [{"name": "max/mean - 1", "value": 0.45, "unit": "", **result}],
    }
    path.write_text(json.dumps(content))
    return folder


def row_of(text: str, says: str) -> str:
    return next(line for line in text.split("\n") if line.startswith(f"| {says}"))


SAYS = "Quantile Balancing needs no step size"


@pytest.mark.parametrize(
    ("result", "status"),
    [
        ({"target": "<= 0.6"}, "reproduced"),
        ({}, "reproduced"),
        ({"target": "<= 0.4"}, "not seen"),
        ({"target": "<= 0.4", "verdict": "same direction"}, "same direction"),
        ({"target": "<= 0.6", "verdict": "not seen"}, "reproduced"),
    ],
)
def test_status_follows_the_target(tmp_path: Path, result: dict, status: str):
    text = claims.render(record(tmp_path, claim="qb-no-step-size", **result))
    row = row_of(text, SAYS)
    assert row.endswith(f"| {status} |") and "0.450" in row and "[qb](records/qb/)" in row


def test_without_records_nothing_is_claimed(tmp_path: Path):
    text = claims.render(tmp_path)
    assert f"0 {claims.REPRODUCED}" in text and row_of(text, SAYS).endswith("| not yet |")
    assert row_of(text, "Sandboxes at scale").endswith("| out of reach |")


def test_the_weakest_finding_decides(tmp_path: Path):
    folder = record(tmp_path, claim="qb-no-step-size", target="<= 0.6")
    path = folder / "qb" / "record.json"
    content = json.loads(path.read_text())
    content["results"].append(
        {"name": "x", "value": 9, "target": "< 1", "claim": "qb-no-step-size"}
    )
    path.write_text(json.dumps(content))
    assert row_of(claims.render(folder), SAYS).endswith("| not seen |")


@pytest.mark.parametrize(
    ("result", "complaint"),
    [
        ({"claim": "no-such"}, "unknown claim 'no-such'"),
        ({"value": "fast"}, "a number as value"),
        ({"target": "about 1"}, "target must look like"),
        ({"verdict": "splendid"}, "got 'splendid'"),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, result: dict, complaint: str):
    with pytest.raises(UserError, match=complaint):
        claims.render(record(tmp_path, **result))


def test_every_claim_has_an_id_of_its_own():
    ids = [claim.id for claim in claims.CLAIMS]
    assert len(ids) == len(set(ids)) == 38


def test_the_docs_are_up_to_date():
    assert (DOCS / "claims.md").read_text() == claims.render(DOCS / "records"), "run: k3 claims"
    readme = (DOCS.parent / "README.md").read_text()
    assert all(mark in readme for mark in claims.MARKS)
    assert readme == claims.with_excerpt(readme, DOCS / "records"), "run: k3 claims"


def test_the_excerpt_has_what_was_measured(tmp_path: Path):
    assert "None" in claims.excerpt(tmp_path)
    text = claims.excerpt(record(tmp_path, claim="qb-no-step-size", target="<= 0.6"))
    assert text.count("\n|") == 2 and SAYS in text and "1 of the report's 38" in text


def test_only_what_stands_between_the_marks_changes(tmp_path: Path):
    text = f"before\n{claims.MARKS[0]}old\n{claims.MARKS[1]}after\n"
    new = claims.with_excerpt(text, tmp_path)
    assert new == text.replace("old\n", claims.excerpt(tmp_path))
    assert claims.with_excerpt("no marks", tmp_path) == "no marks"
