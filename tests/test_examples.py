"""Each example runs by itself, learns in both arms, and shows what it claims."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(name):
    """The example's printed lines; k3 is found from the checkout, installed or not."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def numbers(line):
    return [float(x) for x in re.findall(r"\d+\.?\d*", line)]


@pytest.mark.parametrize(
    "name", ["attention_residuals.py", "quantile_balancing.py", "per_head_muon.py"]
)
def test_example_learns_beside_its_plain_arm(name):
    plain, ours = (numbers(line) for line in run(name))
    for first, last, *_ in (plain, ours):
        assert last < first - 1
    assert plain[0] == pytest.approx(ours[0], abs=0.5)
    if name == "quantile_balancing.py":
        assert plain[2] < 0.1 and plain[3] > 2.5, "without balancing some experts starve"
        assert ours[2] > 0.5 and ours[3] < 2
    if name == "per_head_muon.py":
        assert ours[2] < 1.5 < 3 < plain[2]
    if name == "attention_residuals.py":
        assert ours[1] < plain[1] + 0.1
