"""The built wheel works outside the checkout, with its data files."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def call(*words: str, cwd: Path, **variables: str) -> str:
    done = subprocess.run(
        words, cwd=cwd, capture_output=True, text=True, env={**os.environ, **variables}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_outside_the_checkout(tmp_path: Path):
    call(
        sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), ".", cwd=ROOT
    )
    (wheel,) = tmp_path.glob("openk3-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"k3/constraints.txt", "k3/report/page.css", "k3/cli.py"} <= set(names)
    assert not [name for name in names if not name.startswith(("k3/", "openk3-"))]
    site = tmp_path / "site"
    call(
        *(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site)),
        str(wheel),
        cwd=tmp_path,
    )
    outside = {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    where = call(sys.executable, "-c", "import k3; print(k3.__file__)", cwd=tmp_path, **outside)
    assert where.startswith(str(site))
    for words in (("--help",), ("inspect", "params", "kimi-k3"), ("doctor",)):
        assert call(sys.executable, "-m", "k3", *words, cwd=tmp_path, **outside)
    run = tmp_path / "run"
    quick = ("--steps", "2", "--set", "data.max_bytes=400000", "--set", "data.val_bytes=20000")
    call(
        *(sys.executable, "-m", "k3", "train", "nano", *quick, "--out", str(run)),
        cwd=tmp_path,
        **outside,
    )
    assert "<svg" in (run / "report.html").read_text()
