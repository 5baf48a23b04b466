"""A run folder as plain dicts: what `k3 train` leaves is read back here, whole or cut short."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3 import UserError

Row = dict[str, Any]


@dataclass
class Run:
    """One run: a row per step in `metrics`, per held-out evaluation in `evals`, in step order."""

    name: str
    folder: Path
    config: Row = field(default_factory=dict)
    summary: Row = field(default_factory=dict)
    metrics: list[Row] = field(default_factory=list)
    evals: list[Row] = field(default_factory=list)
    samples: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def series(self, key: str) -> tuple[list[float], list[Any]]:
        """Tokens seen and the value of `key`, where a step has one."""
        rows = [row for row in self.metrics if row.get(key) is not None]
        return [row["tokens"] for row in rows], [row[key] for row in rows]

    def eval_series(self, key: str) -> tuple[list[float], list[float]]:
        """As `series`, for the held-out evaluations; tokens are looked up by step where absent."""
        tokens = {row["step"]: row["tokens"] for row in self.metrics}
        rows = [row for row in self.evals if row.get(key) is not None]
        places = [row.get("tokens", tokens.get(row["step"])) for row in rows]
        kept = [
            (place, row[key]) for place, row in zip(places, rows, strict=True) if place is not None
        ]
        return [place for place, _ in kept], [value for _, value in kept]

    def last(self, key: str) -> Any:
        """The summary's value, else the newest recorded one, else None."""
        if self.summary.get(key) is not None:
            return self.summary[key]
        rows = [row for row in [*self.evals, *self.metrics] if row.get(key) is not None]
        return max(rows, key=lambda row: row["step"])[key] if rows else None


def read_run(folder: Path) -> Run:
    """Reads `run.json`, `metrics.jsonl`, `samples.jsonl` and `summary.json`, whichever exist.

    UserError if `folder` is not a run, or a line inside a file is not JSON: names file and line.
    A torn last line, which a killed run leaves, is dropped and noted.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run folder")
    if not (folder / "run.json").exists() and not (folder / "metrics.jsonl").exists():
        raise UserError(f"{folder}: not a run folder (neither run.json nor metrics.jsonl in it)")
    run = Run(folder.resolve().name, folder)
    run.config = read_json(folder / "run.json")
    run.summary = read_json(folder / "summary.json")
    by_step: dict[int, Row] = {}
    evals: dict[int, Row] = {}
    for number, row in _read_lines(folder / "metrics.jsonl", run.notes):
        _check_step(folder / "metrics.jsonl", number, row)
        # A resumed run repeats the steps after its last save: the later row is the one that counts.
        target = evals if "eval_bpb" in row and "loss" not in row else by_step
        target[row["step"]] = row
    run.metrics = [by_step[step] for step in sorted(by_step)]
    run.evals = [evals[step] for step in sorted(evals)]
    run.samples = [row for _, row in _read_lines(folder / "samples.jsonl", run.notes)]
    if not run.metrics:
        run.notes.append("metrics.jsonl has no steps yet")
    return run


def read_json(path: Path) -> Row:
    """The JSON object in a file, empty when there is none. UserError on anything else."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: a JSON object is expected, got {type(content).__name__}")
    return content


def _read_lines(path: Path, notes: list[str]) -> Iterator[tuple[int, Row]]:
    lines = path.read_text(errors="replace").split("\n") if path.exists() else []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                notes.append(f"{path.name}: the last line ({number}) is torn and was left out")
                return
            raise UserError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: a JSON object is expected, got {type(row).__name__}")
        yield number, row


def _check_step(path: Path, number: int, row: Row) -> None:
    if not isinstance(row.get("step"), int):
        raise UserError(f"{path}:{number}: step must be a whole number, got {row.get('step')!r}")
    if "loss" in row and not isinstance(row.get("tokens"), int | float):
        raise UserError(f"{path}:{number}: tokens must be a number, got {row.get('tokens')!r}")
