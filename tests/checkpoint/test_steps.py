"""A step folder is whole or absent: whatever kills the writer, whatever happens to the files."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from k3 import UserError
from k3.checkpoint import folders, tensorfile
from k3.checkpoint.steps import FILES, latest_step, load_step, save_step

STATE = {"cursor": [3, 1], "loss": 2.5, "name": "é"}


def some_tensors(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    weight = torch.randn(40, 7, generator=draw)
    return {
        "weight": weight,
        "tied": weight,
        "half": torch.randn(5, generator=draw).bfloat16(),
        "scalar": torch.tensor(step),
        "empty": torch.zeros(0, 3),
        "random": torch.get_rng_state(),
        "flag": torch.tensor([True, False, True]),
        "columns": torch.randn(4, 6, generator=draw).T,
    }


def save(folder: Path, step: int, keep: int = 2) -> Path:
    return save_step(
        folder,
        step,
        tensors=some_tensors(step),
        optimizer={"momentum": torch.full((3,), float(step))},
        state=STATE | {"step": step},
        config={"lr": 1e-3},
        keep=keep,
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_holds(path: Path, step: int) -> None:
    found = load_step(path)
    assert found.step == step and found.state == STATE | {"step": step}
    assert found.config == {"lr": 1e-3}
    assert found.tensors.keys() == some_tensors(step).keys()
    for name, tensor in some_tensors(step).items():
        if name != "random":
            assert found.tensors[name].dtype == tensor.dtype
            assert torch.equal(found.tensors[name], tensor), name
    assert torch.equal(found.optimizer["momentum"], torch.full((3,), float(step)))


def test_what_is_saved_is_loaded(tmp_path: Path):
    path = save(tmp_path / "run" / "steps", 100)
    assert path.name == "step_00000100"
    assert names(path) == sorted([*FILES, "COMPLETE"])
    assert_holds(path, 100)
    made = load_step(path).made
    assert made["torch"] == torch.__version__ and made["date"].endswith("+00:00")


def test_tied_values_are_stored_once(tmp_path: Path):
    tied, apart = torch.zeros(1000), torch.zeros(1000)
    empty = {"optimizer": {}, "state": {}, "config": {}}
    one = save_step(tmp_path, 1, tensors={"a": tied, "b": tied}, **empty)
    two = save_step(tmp_path, 2, tensors={"a": tied, "b": apart}, **empty)
    sizes = [(path / "tensors.safetensors").stat().st_size for path in (one, two)]
    assert sizes[1] - sizes[0] > 3900


def test_latest_is_the_highest_complete_step(tmp_path: Path):
    assert latest_step(tmp_path / "none") is None and latest_step(tmp_path) is None
    for step in (9, 10, 100_000_000):
        save(tmp_path, step, keep=9)
    (tmp_path / "step_99999999").mkdir()
    (tmp_path / "step_00000500.bak").mkdir()
    latest = latest_step(tmp_path)
    assert latest is not None and latest.name == "step_100000000"
    (latest / "COMPLETE").unlink()
    latest = latest_step(tmp_path)
    assert latest is not None and latest.name == "step_00000010"


def test_old_steps_go_and_the_newest_stay(tmp_path: Path):
    for step in range(1, 6):
        save(tmp_path, step)
    assert names(tmp_path) == ["step_00000004", "step_00000005"]
    save(tmp_path, 6, keep=1)
    assert names(tmp_path) == ["step_00000006"]


def test_the_step_just_written_stays_even_when_it_is_not_the_highest(tmp_path: Path):
    save(tmp_path, 8)
    save(tmp_path, 9)
    save(tmp_path, 3)
    assert names(tmp_path) == ["step_00000003", "step_00000009"]


def test_a_step_can_be_written_again(tmp_path: Path):
    path = save(tmp_path, 7)
    (path / "COMPLETE").unlink()
    assert_holds(save(tmp_path, 7), 7)
    assert names(tmp_path) == ["step_00000007"]


def test_without_an_atomic_exchange_a_step_can_be_written_again(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
    test_a_step_can_be_written_again(tmp_path)


def spoil(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "truncated":
        path.write_bytes(data[:-1])
    elif how == "changed":
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    else:
        path.unlink()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("how", "words"), [("truncated", "bytes"), ("changed", "SHA-256"), ("missing", "missing")]
)
def test_a_spoiled_file_is_refused_by_name(tmp_path: Path, name: str, how: str, words: str):
    path = save(tmp_path, 1)
    record = json.loads((path / "COMPLETE").read_text())["files"][name]
    spoil(path / name, how)
    with pytest.raises(UserError) as caught:
        load_step(path)
    line = str(caught.value)
    assert name in line and words in line and "\n" not in line
    assert str(record["sha256" if how == "changed" else "bytes"]) in line


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": 1}', '{"step": 1, "files": 3}'])
def test_a_spoiled_record_is_refused(tmp_path: Path, text: str):
    path = save(tmp_path, 1)
    (path / "COMPLETE").write_text(text)
    with pytest.raises(UserError, match="COMPLETE"):
        load_step(path)


def test_a_renamed_or_unfinished_step_is_refused(tmp_path: Path):
    path = save(tmp_path, 1)
    path.rename(tmp_path / "step_00000002")
    with pytest.raises(UserError, match="says step 1, the folder is named step_00000002"):
        load_step(tmp_path / "step_00000002")
    with pytest.raises(UserError, match="no COMPLETE"):
        load_step(tmp_path / "step_00000009")


def test_state_that_is_not_json_leaves_nothing(tmp_path: Path):
    with pytest.raises(TypeError):
        save_step(tmp_path, 1, tensors={}, optimizer={}, state={"x": object()}, config={})
    assert names(tmp_path) == []


@pytest.mark.parametrize("after", range(12))
def test_a_full_disk_is_one_line_and_harms_nothing(tmp_path: Path, monkeypatch, after: int):
    save(tmp_path, 1)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    refused = fail_after(monkeypatch, after)
    with pytest.raises(UserError, match="no space left") as caught:
        save(tmp_path, 2)
    monkeypatch.undo()
    assert refused and "\n" not in str(caught.value)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert names(tmp_path) == ["step_00000001"]
    save(tmp_path, 2)


def fail_after(monkeypatch, calls: int) -> list[int]:
    """Lets `calls` writes through, then half of one, then none."""
    real, seen, refused = os.write, [0], []

    def write(fd, data):
        seen[0] += 1
        if seen[0] <= calls:
            return real(fd, data)
        if seen[0] == calls + 1 and len(data) > 1:
            return real(fd, data[: len(data) // 2])
        refused.append(fd)
        raise OSError(errno.ENOSPC if calls % 2 else errno.EDQUOT, "No space left on device")

    monkeypatch.setattr(tensorfile.os, "write", write)
    return refused


def test_a_full_disk_at_the_sync_is_one_line(tmp_path: Path, monkeypatch):
    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="no space left"):
        save(tmp_path, 2)
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path):
    (tmp_path / "steps").write_text("a file")
    with pytest.raises(UserError, match="steps: cannot be written"):
        save(tmp_path / "steps", 1)


def test_dying_at_any_system_call_leaves_whole_steps(tmp_path: Path):
    """The writer is a forked child that exits at the n-th call that changes the disk."""
    save(tmp_path, 1)
    deaths = 0
    for fatal in range(100):
        pid = os.fork()
        if pid == 0:
            die_at(fatal)
            save(tmp_path, 2, keep=1)
            os._exit(0)
        died = os.waitpid(pid, 0)[1] != 0
        latest = latest_step(tmp_path)
        assert latest is not None
        assert_holds(latest, 1 if latest.name.endswith("1") else 2)
        for path in tmp_path.glob("step_*"):
            assert_holds(path, int(path.name[-1]))
        if not died:
            break
        deaths += 1
    assert deaths > 20 and names(tmp_path) == ["step_00000002"]


def die_at(fatal: int) -> None:
    left = [fatal]

    def counted(call):
        def run(*args, **kwargs):
            if left[0] == 0:
                os._exit(9)
            left[0] -= 1
            return call(*args, **kwargs)

        return run

    for name in ("write", "fsync", "open", "mkdir", "rename", "unlink", "rmdir", "close"):
        setattr(os, name, counted(getattr(os, name)))


WRITER = """
import sys, torch
from pathlib import Path
from k3.checkpoint.steps import save_step
print("ready", flush=True)
for step in range(1, 10000):
    value = {"w": torch.full((300_000,), float(step))}
    save_step(Path(sys.argv[1]), step, tensors=value, optimizer=value, state={"at": step},
              config={}, keep=2)
"""


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_a_random_moment(tmp_path: Path, seed: int):
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
    time.sleep(random.Random(seed).uniform(0.02, 0.4))
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    for path in tmp_path.glob("step_*"):
        found = load_step(path)
        assert found.state == {"at": found.step}
        assert (found.tensors["w"] == found.step).all()
    save(tmp_path, 20000)
    assert all(name.startswith("step_") for name in names(tmp_path))


def test_what_a_living_writer_writes_is_left_alone(tmp_path: Path):
    """A second process holds the temporary folder of another step; only its death frees it."""
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from k3.checkpoint.folders import whole_folder\n"
        "with whole_folder(Path(sys.argv[1]) / 'step_00000050', '') as temp:\n"
        "    (temp / 'half').write_text('x'); print('in', flush=True); time.sleep(60)\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == b"in\n"
        save(tmp_path, 1)
        assert len(list(tmp_path.glob(".step_00000050*"))) == 1
    finally:
        other.kill()
        other.wait()
    save(tmp_path, 2)
    assert names(tmp_path) == ["step_00000001", "step_00000002"]
