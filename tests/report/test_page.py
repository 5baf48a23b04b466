"""The page holds what the runs hold, fetches nothing, and says what is wrong with a broken run."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from k3 import UserError
from k3.report import plots
from k3.report.page import flatten, render, write_page
from k3.report.runs import read_run

STEPS = 40


def make_run(folder: Path, *, moe: bool = True, steps: int = STEPS) -> Path:
    folder.mkdir(parents=True)
    rows = []
    for step in range(1, steps + 1):
        row = {
            "step": step,
            "tokens": step * 1000,
            "context": 256 if step <= 30 else 1024,
            "loss": 2 + 5 / step,
            "lr": 0.01,
            "grad_norm": 1.0 / step,
            "tokens_per_s": 20_000.0,
            "memory_mb": 900,
            "max_logit": 3.5,
            "output_norm": [1.0, 1.5, 2.0],
        }
        if moe:
            row |= {"load_max_over_mean": 1.3, "idle_share": 0.0}
        rows.append(row)
        if step % 10 == 0:
            rows.append({"step": step, "eval_bpb": 2 + 1 / step, "eval_loss": 3.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.json").write_text(
        json.dumps({"name": "nano", "model": {"kda": {"num_heads": 2}}, "seed": 7})
    )
    sample = {"step": steps, "prompt": "def ", "text": "def f(x): return x < 1 & <script>"}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    (folder / "summary.json").write_text(
        json.dumps({"params": 1_400_000, "baselines": {"gzip -9": 2.5, "xz": 2.45}})
    )
    return folder


class Fetches(HTMLParser):
    """Collects whatever would make a browser load something, and every id."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and not (value or "").startswith(
                ("#", "data:")
            ):
                self.loads.append(f"{tag} {name}={value}")
            if name == "id":
                self.ids.append(value or "")
        if tag in ("script", "link", "iframe"):
            self.loads.append(tag)


def page_of(*folders: Path, out: Path) -> str:
    return write_page(folders, out).read_text()


def test_page_of_one_run(tmp_path: Path):
    text = page_of(make_run(tmp_path / "nano"), out=tmp_path / "report.html")
    assert text.count("<svg") == 10 and "nan" not in text.replace("nano", "")
    assert "2.025" in text and "gzip -9" in text and "1.4M parameters" in text
    assert "model.kda.num_heads" in text
    assert "return x &lt; 1 &amp; &lt;script&gt;" in text and "<script" not in text
    assert not (tmp_path / "report.html.part").exists()


def test_page_fetches_nothing_and_ids_are_unique(tmp_path: Path):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", moe=False)]
    parser = Fetches()
    parser.feed(page_of(*runs, out=tmp_path / "report.html"))
    assert parser.loads == []
    assert len(parser.ids) == len(set(parser.ids))
    probe = Fetches()
    probe.feed('<img src="http://elsewhere/x.png"><link rel="stylesheet" href="x.css">')
    assert len(probe.loads) == 3


def test_only_page_variables_colour_the_curves(tmp_path: Path):
    text = page_of(make_run(tmp_path / "nano"), out=tmp_path / "report.html")
    assert not re.search("|".join(plots.VARIABLES), text)
    assert "var(--s1)" in text and "var(--ink)" in text
    for variable in plots.VARIABLES.values():
        assert text.count(f"{variable}: #") == 2, f"{variable} needs a light and a dark colour"


def test_runs_of_one_name_are_told_apart(tmp_path: Path):
    text = page_of(make_run(tmp_path / "x/run"), make_run(tmp_path / "y/run"), out=tmp_path / "r")
    assert "x/run" in text and "y/run" in text and "Side by side" in text


def test_page_is_the_same_twice(tmp_path: Path):
    run = make_run(tmp_path / "nano")
    assert render([read_run(run)]) == render([read_run(run)])


def test_run_without_steps(tmp_path: Path):
    run = make_run(tmp_path / "nano", steps=0)
    (run / "summary.json").unlink()
    (run / "samples.jsonl").unlink()
    text = page_of(run, out=tmp_path / "report.html")
    assert "no steps yet" in text and "<svg" not in text


def test_torn_last_line_is_noted(tmp_path: Path):
    run = make_run(tmp_path / "nano")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 41, "tok')
    read = read_run(run)
    assert len(read.metrics) == STEPS and "torn" in read.notes[0]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"step": 3, "tok', "metrics.jsonl:3: not JSON"),
        ("[1, 2]", "metrics.jsonl:3: a JSON object is expected, got list"),
        ('{"step": "three"}', "metrics.jsonl:3: step must be a whole number, got 'three'"),
        ('{"step": 3, "loss": 1}', "metrics.jsonl:3: tokens must be a number, got None"),
    ],
)
def test_corrupt_line_is_named(tmp_path: Path, line: str, complaint: str):
    run = make_run(tmp_path / "nano")
    lines = (run / "metrics.jsonl").read_text().split("\n")
    (run / "metrics.jsonl").write_text("\n".join([*lines[:2], line, *lines[2:]]))
    with pytest.raises(UserError, match=re.escape(complaint)):
        write_page([run], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_what_is_no_run_is_refused(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    for folder, complaint in ((tmp_path / "empty", "not a run"), (tmp_path / "none", "no such")):
        with pytest.raises(UserError, match=complaint):
            write_page([folder], tmp_path / "report.html")
    run = make_run(tmp_path / "nano")
    with pytest.raises(UserError, match="twice"):
        write_page([run, run], tmp_path / "report.html")


def test_a_resumed_run_keeps_the_later_row(tmp_path: Path):
    run = make_run(tmp_path / "nano")
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 5, "tokens": 5000, "loss": 9.0}) + "\n")
    read = read_run(run)
    assert len(read.metrics) == STEPS and read.metrics[4]["loss"] == 9.0
    assert [row["step"] for row in read.metrics] == sorted(row["step"] for row in read.metrics)


def test_held_out_points_stand_at_their_tokens(tmp_path: Path):
    xs, ys = read_run(make_run(tmp_path / "nano")).eval_series("eval_bpb")
    assert xs == [10_000, 20_000, 30_000, 40_000] and ys[-1] == pytest.approx(2.025)


def test_different_texts_are_not_joined(tmp_path: Path):
    run = read_run(make_run(tmp_path / "nano"))
    assert plots.comparable(run)[1] == []
    for row in run.evals:
        row["eval_bytes"] = 50_000
    run.evals[-1]["eval_bytes"] = 280_000
    same, others = plots.comparable(run)
    assert [tokens for tokens, _ in same] == [10_000, 20_000, 30_000]
    assert others == [(40_000, pytest.approx(2.025))]


def test_the_newest_value_counts(tmp_path: Path):
    run = make_run(tmp_path / "nano", steps=35)
    read = read_run(run)
    assert read.last("tokens") == 35_000 and read.last("eval_bpb") == pytest.approx(2 + 1 / 30)
    assert read.last("params") == 1_400_000 and read.last("wings") is None


def test_smoothing_neither_lags_nor_biases():
    line = [float(i) for i in range(100)]
    assert plots.smooth(line, 7) == pytest.approx(line)
    assert plots.smooth([5.0], 3) == [5.0]
    zigzag = plots.smooth([float(i % 2) for i in range(101)], 10)
    assert max(abs(y - 0.5) for y in zigzag[10:-10]) < 0.03


def test_thinning_keeps_the_last_point():
    xs, ys = plots.thin(list(range(10_001)), list(range(10_001)))
    assert len(xs) <= plots.POINTS + 60 and xs[-1] == ys[-1] == 10_000 and xs[0] == 0


def test_stage_switches(tmp_path: Path):
    assert plots.stage_switches(read_run(make_run(tmp_path / "nano"))) == [(31_000, 1024)]


def test_settings_are_named_as_the_command_line_names_them():
    tree = {"a": {"b": 1, "c": {"d": [1, 2]}}, "e": "text", "f": {}}
    assert list(flatten(tree)) == [("a.b", "1"), ("a.c.d", "[1, 2]"), ("e", "text"), ("f", "{}")]
