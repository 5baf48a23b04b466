"""Writing `docs/records/NAME/`: the numbers, where they come from, and the log of the run."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def result(
    name: str,
    values: Sequence[float],
    unit: str = "",
    target: str | None = None,
    claim: str | None = None,
) -> dict[str, Any]:
    """One row of a record: the median of the runs, and 10th and 90th percentile if several."""
    row: dict[str, Any] = {"name": name, "value": quantile(values, 0.5), "unit": unit}
    if target:
        row["target"] = target
    if len(values) > 1:
        row |= {"p10": quantile(values, 0.1), "p90": quantile(values, 0.9)}
    if claim:
        row["claim"] = claim
    return row


def quantile(values: Sequence[float], q: float) -> float:
    return float(f"{torch.tensor(values, dtype=torch.float64).quantile(q).item():.6g}")


def write(
    name: str,
    command: str,
    seeds: Sequence[int],
    results: Sequence[dict[str, Any]],
    log: Sequence[str],
) -> Path:
    """Returns the folder. `command` is what a reader types in the checkout to get it again."""
    folder = DOCS / "records" / name
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "name": name,
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "hardware": hardware(),
        "command": command,
        "seeds": list(seeds),
        "results": list(results),
    }
    (folder / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "log.txt").write_text("\n".join(log) + "\n")
    return folder


def hardware() -> str:
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    threads = f"{torch.get_num_threads()} threads"
    return f"{_processor()}, {threads}, torch {torch.__version__}, {python}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
