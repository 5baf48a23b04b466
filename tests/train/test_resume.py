"""Stopped anywhere, by anything, a run goes on to the same losses, bit for bit."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_run import learned, rows, tiny_run

from k3 import UserError
from k3.optim.muon import Muon
from k3.train import pretrain as loop
from k3.train.pretrain import pretrain

HERE = Path(__file__).parent


class Killed(BaseException):
    """Stands for a process that ends in the middle of something."""


def stop_at_micro_batch(number, monkeypatch):
    """The run dies in the forward pass of micro-batch `number` (from 1)."""
    plain, calls = loop.losses, []

    def dying(model, batch):
        calls.append(None)
        if len(calls) == number:
            raise Killed
        return plain(model, batch)

    monkeypatch.setattr(loop, "losses", dying)


# Two micro-batches a step; the stage changes after step 3; an epoch of the corpus is longer than
# the run.
@pytest.mark.parametrize("micro_batch", [1, 4, 7, 8, 12])
def test_a_killed_run_goes_on_bit_equal(corpus, straight, tmp_path, monkeypatch, micro_batch):
    stop_at_micro_batch(micro_batch, monkeypatch)
    with pytest.raises(Killed):
        pretrain(tiny_run(corpus), tmp_path)
    monkeypatch.undo()
    assert len(rows(tmp_path)) == (micro_batch - 1) // 2
    pretrain(tiny_run(corpus), tmp_path)
    assert learned(tmp_path) == learned(straight)


def test_across_the_end_of_an_epoch(corpus, tmp_path, monkeypatch):
    """Packs long enough that the corpus is read more than twice, in another order each time."""
    data = replace(tiny_run(corpus).data, tokens_per_micro_batch=1024)
    run = tiny_run(corpus, data=data, micro_batches=2)
    pretrain(run, tmp_path / "straight")
    state = json.loads((tmp_path / "straight/steps/step_00000006/state.json").read_text())
    assert state["loader"]["sources"]["corpus"]["epoch"] >= 1
    stop_at_micro_batch(8, monkeypatch)
    with pytest.raises(Killed):
        pretrain(run, tmp_path / "again")
    monkeypatch.undo()
    pretrain(run, tmp_path / "again")
    assert learned(tmp_path / "again") == learned(tmp_path / "straight")


def test_forgetting_any_part_would_show(corpus, straight, tmp_path, monkeypatch):
    def resumed(name):
        stop_at_micro_batch(7, monkeypatch)
        with pytest.raises(Killed):
            pretrain(tiny_run(corpus), tmp_path / name)
        monkeypatch.undo()

    for part in ("optimizer", "loader"):
        resumed(part)
        if part == "optimizer":
            monkeypatch.setattr(Muon, "load_state_dict", lambda self, state: None)
        else:
            monkeypatch.setattr("k3.data.loader.Loader.load_state_dict", lambda self, state: None)
        pretrain(tiny_run(corpus), tmp_path / part)
        monkeypatch.undo()
        assert learned(tmp_path / part)[-2] != learned(straight)[-2], part


def test_rows_after_the_saved_step_are_written_anew(corpus, straight, tmp_path, monkeypatch):
    slow = tiny_run(corpus, save_every_s=1e9, save_at_stages=True)
    stop_at_micro_batch(11, monkeypatch)
    with pytest.raises(Killed):
        pretrain(slow, tmp_path)
    monkeypatch.undo()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5]
    assert [path.name for path in (tmp_path / "steps").iterdir()] == ["step_00000003"]
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lo')
    pretrain(slow, tmp_path)
    assert learned(tmp_path) == learned(straight)


def test_a_finished_run_is_left_as_it_is(corpus, straight):
    before = (straight / "metrics.jsonl").read_bytes()
    run = tiny_run(
        Path(json.loads((straight / "run.json").read_text())["data"]["sources"][0]["path"])
    )
    summary = pretrain(run, straight)
    assert (straight / "metrics.jsonl").read_bytes() == before
    assert summary["step"] == 6
    with pytest.raises(UserError, match="holds a run already"):
        pretrain(run, straight, resume="never")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 7}, "steps was 6, this run has 7"),
        ({"seed": 1}, "seed was 0, this run has 1"),
        ({"micro_batches": 4}, "micro_batches was 2, this run has 4"),
    ],
)
def test_another_configuration_is_refused_with_both_values(corpus, straight, change, message):
    with pytest.raises(UserError, match=message):
        pretrain(tiny_run(corpus, **change), straight)


def test_other_data_is_refused(corpus, straight, tmp_path):
    other = tmp_path / "corpus"
    other.mkdir()
    for path in corpus.iterdir():
        (other / path.name).write_text(path.read_text().replace("return", "yield"))
    run = tiny_run(corpus)
    data = replace(run.data, sources=(replace(run.data.sources[0], path=str(other)),))
    with pytest.raises(UserError, match="data.sources was"):
        pretrain(replace(run, data=data), straight)


def run_until_signalled(corpus: Path, out: Path, number: int, micro_batch: int):
    """The tiny run as a process of its own, which gets a signal in a forward pass (from 1)."""
    code = (
        "import os, sys\n"
        f"sys.path.insert(0, {str(HERE)!r})\n"
        "from pathlib import Path\n"
        "from tiny_run import tiny_run\n"
        "from k3.train import pretrain as loop\n"
        "plain, calls = loop.losses, []\n"
        "def losses(*arguments):\n"
        "    calls.append(None)\n"
        f"    if len(calls) == {micro_batch}: os.kill(os.getpid(), {int(number)})\n"
        "    return plain(*arguments)\n"
        "loop.losses = losses\n"
        f"loop.pretrain(tiny_run(Path({str(corpus)!r})), Path({str(out)!r}))\n"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent.parent)}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120
    )


def test_kill_minus_nine(corpus, straight, tmp_path):
    done = run_until_signalled(corpus, tmp_path, signal.SIGKILL, 8)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]
    pretrain(tiny_run(corpus), tmp_path)
    assert learned(tmp_path) == learned(straight)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_lets_the_step_finish_and_saves(corpus, straight, tmp_path, number, code):
    done = run_until_signalled(corpus, tmp_path, number, 8)
    assert done.returncode == code, done.stderr
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("stopped after step 4 of 6; ") and str(tmp_path) in last
    pretrain(tiny_run(corpus), tmp_path)
    assert learned(tmp_path) == learned(straight)
