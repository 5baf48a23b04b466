"""A run's folder: opened once, added to at every step, finished with what others can use.

Only the first rank writes; the others hold the same object and stay silent.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from k3 import UserError, __version__
from k3.checkpoint.params import active_params, total_params
from k3.checkpoint.released import save_released
from k3.checkpoint.steps import latest_step
from k3.data.baselines import gzip_bits_per_byte, xz_bits_per_byte
from k3.parallel.mesh import Mesh
from k3.report.page import write_page
from k3.report.runs import read_run
from k3.train.config import RunConfig, to_dict
from k3.train.curriculum import tokens_until
from k3.train.interrupt import one_line_failures
from k3.train.metrics import Board, JsonLines, Row
from k3.train.parts import STEPS, Parts, restore
from k3.train.progress import Display

BASELINE_BYTES = 1 << 25
"""Held-out text larger than this isn't compressed for comparison: xz would take minutes."""


class RunFolder:
    """Where a run writes. `saved_step` is the newest step that a step folder holds."""

    def __init__(self, run: RunConfig, out: Path, mesh: Mesh) -> None:
        self.run, self.out, self.mesh = run, out, mesh
        self.display = Display(run.steps, visible=mesh.is_main)
        self.saved_step = 0
        self._files: dict[str, JsonLines] = {}
        self._board: Board | None = None

    def begin(self, parts: Parts) -> int:
        """Puts the parts back to the last step folder, if there is one, and opens the files after
        it.
        """
        self.saved_step = done = restore(self.run, self.out, parts, self.mesh)
        if not self.mesh.is_main:
            return done
        environment = _environment(self.mesh, parts)
        _write_json(self.out / "run.json", to_dict(self.run) | {"environment": environment})
        for name in ("metrics", "samples"):
            self._files[name] = JsonLines(self.out / f"{name}.jsonl", done)
        self._board = Board(self.out / "tensorboard", self.run.tensorboard)
        self._announce(done, parts)
        return done

    def _announce(self, done: int, parts: Parts) -> None:
        run, total, active = self.run, *_count_parameters(self.run)
        for corpus in parts.loader.corpora.values():
            self.display.say(corpus.describe())
        self.display.say(
            f"{run.name}: {total:,} parameters, {active:,} active; {run.steps} steps, "
            f"{tokens_until(run, run.steps):,} tokens, on {self.mesh.world} x {self.mesh.device}; "
            f"{self.out}"
        )
        if done:
            self.display.say(f"going on after step {done}")

    def step(self, row: Row) -> None:
        self.display.step(row)
        self._write("metrics", row)

    def evaluated(self, row: Row) -> None:
        self.display.evaluated(row)
        self._write("metrics", row)

    def samples(self, rows: list[Row]) -> None:
        for row in rows:
            self._write("samples", row)
        for row in rows[:1]:
            self.display.sample(row)

    def _write(self, name: str, row: Row) -> None:
        if name in self._files:
            self._files[name].write(row)
        if name == "metrics" and self._board is not None:
            self._board.write(row)

    def stopped(self, step: int) -> None:
        self.display.close()
        self.display.say(
            f"stopped after step {step} of {self.run.steps}; the same command with "
            f"--out {self.out} goes on from there"
        )

    def what_is_safe(self) -> str:
        """For the end of an error message."""
        if self.saved_step:
            return f"{self.out} can go on after step {self.saved_step}"
        return f"no step of {self.out} was saved yet"

    def close(self) -> None:
        self.display.close()
        for file in self._files.values():
            file.close()
        if self._board is not None:
            self._board.close()


@contextmanager
def open_run(run: RunConfig, out: Path, mesh: Mesh, resume: str) -> Iterator[RunFolder]:
    """The folder of a run, made if need be; failures inside become one line.

    resume: auto; must (UserError without a step folder); never (UserError with one).
    """
    found = latest_step(out / STEPS) if out.exists() else None
    if resume == "must" and found is None:
        raise UserError(f"{out}: no complete step folder to resume from")
    if resume == "never" and found is not None:
        raise UserError(f"{out}: holds a run already ({found.name}); resume it or choose another")
    log = RunFolder(run, out, mesh)
    try:
        with one_line_failures(log.what_is_safe):
            if mesh.is_main:
                _make_folder(out)
            yield log
    finally:
        log.close()


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out}: can't be made ({error.strerror})") from error


def finish(run: RunConfig, parts: Parts, log: RunFolder) -> dict[str, Any]:
    """Writes `hf/`, `summary.json` and `report.html` of a run that is done; the summary."""
    log.close()
    if not log.mesh.is_main:
        return {}
    tokenizer = parts.loader.tokenizer
    save_released(parts.model, log.out / "hf", tokenizer=tokenizer, dtype=run.export_dtype)
    summary = _summary(run, parts, log)
    _write_json(log.out / "summary.json", summary)
    write_page([log.out], log.out / "report.html")
    return summary


def _summary(run: RunConfig, parts: Parts, log: RunFolder) -> dict[str, Any]:
    kept = read_run(log.out)
    last, rows = kept.metrics[-1], kept.metrics
    seconds = sum(run.step_tokens(row["context"]) / row["tokens_per_s"] for row in rows)
    total, active = _count_parameters(run)
    return {
        "name": run.name,
        "steps": run.steps,
        "seconds": seconds,
        "device": _device_name(log.mesh),
        "params": total,
        "active_params": active,
        "memory_mb": max(row["memory_mb"] for row in rows),
        "corpus_sha256": parts.loader.corpus_sha256,
        "baselines": _baselines(parts.loader.held_out_documents()),
        **{
            key: last.get(key)
            for key in ("step", "tokens", "loss", "mtp_loss", "max_logit")
            + ("load_max_over_mean", "idle_share")
        },
        **{key: value for key, value in kept.evals[-1].items() if key.startswith("eval_")},
        "tokens_per_s": statistics.median(row["tokens_per_s"] for row in rows),
    }


def _count_parameters(run: RunConfig) -> tuple[int, int]:
    """All parameters, and those that one token multiplies."""
    return total_params(run.model), round(active_params(run.model))


def _baselines(documents: list[bytes]) -> dict[str, float]:
    """Bits per byte of ordinary compressors on the held-out text."""
    if sum(map(len, documents)) > BASELINE_BYTES:
        return {}
    return {"gzip -9": gzip_bits_per_byte(documents), "xz -9": xz_bits_per_byte(documents)}


def _environment(mesh: Mesh, parts: Parts) -> dict[str, Any]:
    return {
        "openk3": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": _device_name(mesh),
        "ranks": mesh.world,
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "corpus_sha256": parts.loader.corpus_sha256,
        "tokenizer": parts.loader.tokenizer.fingerprint,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _device_name(mesh: Mesh) -> str:
    if mesh.device.type == "cuda":
        return torch.cuda.get_device_name(mesh.device)
    return f"{platform.machine()} CPU"


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)
