"""Two gloo ranks are one rank: losses to 1e-6, integers exactly, and either goes on where the other
stopped.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import learned, rows, tiny_run

from k3.checkpoint.steps import load_step
from k3.train.pretrain import pretrain

HERE = Path(__file__).parent
EXACT = ("step", "tokens", "stage", "context", "lr", "load_max_over_mean", "idle_share")
"""Counted, not computed in floating point."""
CHANGES = {"micro_batches": 4, "steps": 4, "eval_every": 2, "save_every_s": 1e9}


def in_ranks(world: int, corpus: Path, out: Path, **changes) -> subprocess.CompletedProcess:
    """The tiny run under torchrun."""
    script = out.parent / "run.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(HERE)!r})\n"
        "from pathlib import Path\nfrom tiny_run import tiny_run\n"
        "from k3.train.pretrain import pretrain\nimport k3.train.run_folder as folder\n"
        "folder.write_page = lambda folders, page: page\n"
        f"pretrain(tiny_run(Path({str(corpus)!r}), **{changes!r}), {str(out)!r})\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent.parent)}
    return subprocess.run(
        [*command, f"--nproc-per-node={world}", str(script)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
    )


@pytest.fixture(scope="module")
def one(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks") / "one"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("k3.train.run_folder.write_page", lambda folders, page: page)
        pretrain(tiny_run(corpus, **CHANGES), out)
    return out


@pytest.fixture(scope="module")
def two(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks") / "two"
    done = in_ranks(2, corpus, out, **CHANGES)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


def assert_same(one: Path, two: Path) -> None:
    for a, b in zip(learned(one), learned(two), strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            if key in EXACT or isinstance(value, int):
                assert value == b[key], (a["step"], key)
            else:
                assert b[key] == pytest.approx(value, abs=1e-6, rel=1e-5), (a["step"], key)


def test_two_ranks_equal_one(one, two):
    losses = [[row["loss"] for row in rows(out) if "loss" in row] for out in (one, two)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    assert_same(one, two)
    assert json.loads((two / "run.json").read_text())["environment"]["ranks"] == 2


def test_router_biases_come_from_the_same_integers(one, two):
    folders = [load_step(out / "steps/step_00000004") for out in (one, two)]
    biases = [
        {n: t for n, t in folder.tensors.items() if n.endswith("e_score_correction_bias")}
        for folder in folders
    ]
    for name, bias in biases[0].items():
        # A few margins may cross the edge of a bin (a hundredth of the range) when scores differ in
        # the last bit.
        assert (bias - biases[1][name]).abs().max() < 1e-3, name


@pytest.mark.parametrize("first", [1, 2])
def test_a_run_goes_on_at_another_rank_count(corpus, one, tmp_path, first):
    changes = CHANGES | {"save_at_stages": True}
    folder = tmp_path / "run"
    pretrain_until(corpus, folder, first, changes)
    assert [path.name for path in (folder / "steps").iterdir()] == ["step_00000002"]
    if first == 1:
        done = in_ranks(2, corpus, folder, **changes)
        assert done.returncode == 0, done.stderr[-2000:]
    else:
        pretrain(tiny_run(corpus, **changes), folder)
    assert_same(one, folder)


def pretrain_until(corpus, folder, world, changes) -> None:
    """Trains and loses everything after the first stage's step folder."""
    if world == 1:
        pretrain(tiny_run(corpus, **changes, keep=9), folder)
    else:
        assert in_ranks(2, corpus, folder, **changes, keep=9).returncode == 0
    for path in sorted((folder / "steps").iterdir())[1:]:
        for file in path.iterdir():
            file.unlink()
        path.rmdir()


def test_work_that_ranks_cannot_share_is_one_line(corpus, tmp_path):
    done = in_ranks(2, corpus, tmp_path / "run", micro_batches=3)
    assert done.returncode != 0
    assert re.search(r"micro_batches 3 can't be shared evenly by 2 ranks", done.stderr)
