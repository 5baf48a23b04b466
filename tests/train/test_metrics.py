"""Rows that survive a kill, and rows that must not."""

import json

import pytest

from k3 import UserError
from k3.train import metrics
from k3.train.metrics import Board, JsonLines

ROWS = [
    {"step": 1, "loss": 2.5},
    {"step": 2, "loss": 2.0},
    {"step": 2, "eval_bpb": 3.0},
    {"step": 3, "loss": 1.5},
]


def written(path, tail=b""):
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in ROWS) + tail)
    return path


@pytest.mark.parametrize("tail", [b"", b'{"step": 4, "lo', b"\xff\xfe", b'{"step": 2}'])
@pytest.mark.parametrize(("step", "kept"), [(0, 0), (1, 1), (2, 3), (3, 4), (9, 4)])
def test_rows_after_the_step_and_torn_rows_go(tmp_path, tail, step, kept):
    path = written(tmp_path / "metrics.jsonl", tail)
    file = JsonLines(path, step)
    file.write({"step": step + 1, "loss": 1.0})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        *ROWS[:kept],
        {"step": step + 1, "loss": 1.0},
    ]
    file.close()


def test_kept_rows_keep_their_bytes(tmp_path):
    path = written(tmp_path / "metrics.jsonl")
    before = path.read_bytes()
    JsonLines(path, 3).close()
    assert path.read_bytes() == before


def test_tensorboard_is_used_only_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "_has_tensorboard", lambda: False)
    for wanted in ("auto", "off"):
        board = Board(tmp_path / "board", wanted)
        board.write({"step": 1, "loss": 1.0})
        board.close()
    assert not (tmp_path / "board").exists()
    with pytest.raises(UserError, match="tensorboard: on, but the package"):
        Board(tmp_path / "board", "on")
