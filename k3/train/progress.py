"""A progress bar on a terminal, a line now and then elsewhere, nothing on ranks that are not the
first.
"""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_EVERY_S = 10.0


class Display:
    """Shows steps as they come. `preparing` is a loader's progress callback."""

    def __init__(self, total_steps: int, visible: bool = True) -> None:
        self._console = Console(quiet=not visible, highlight=False, soft_wrap=True)
        self._total = total_steps
        self._bpb: float | None = None
        self._last_line = -LINE_EVERY_S
        self._rate = 0.0
        self._bar: Progress | None = None
        if visible and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total}"),
                TextColumn("{task.fields[facts]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._bar.start()
            self._task = self._bar.add_task("preparing", total=total_steps, facts="")

    def say(self, line: str) -> None:
        self._console.print(line, markup=False)

    def preparing(self, what: str, done: int, total: int) -> None:
        if self._bar is not None:
            share = f"{100 * done / total:.0f}%" if total else ""
            self._bar.update(self._task, description=what, facts=share)
        elif time.monotonic() - self._last_line >= LINE_EVERY_S or done == 0:
            self._last_line = time.monotonic()
            self.say(f"{what}: {done:,} of {total:,}")

    def step(self, row: dict[str, Any]) -> None:
        """A step's metrics: loss, held-out bits per byte, tokens per second, time left."""
        step, speed = row["step"], row["tokens_per_s"]
        self._rate = speed if not self._rate else 0.9 * self._rate + 0.1 * speed
        facts = f"loss {row['loss']:.3f}  {self._rate:,.0f} tokens/s"
        if self._bpb is not None:
            facts += f"  {self._bpb:.3f} bits/byte"
        if self._bar is not None:
            self._bar.update(self._task, description="training", completed=step, facts=facts)
        elif time.monotonic() - self._last_line >= LINE_EVERY_S or step in (1, self._total):
            self._last_line = time.monotonic()
            left = (self._total - step) * row["tokens"] / step / max(self._rate, 1e-9)
            self.say(f"step {step}/{self._total}  {facts}  {_duration(left)} left")

    def evaluated(self, row: dict[str, Any]) -> None:
        self._bpb = row["eval_bpb"]
        self.say(f"step {row['step']}: held-out {self._bpb:.4f} bits/byte")

    def sample(self, row: dict[str, Any]) -> None:
        first = (row["prompt"] + row["text"]).strip().splitlines()[:1]
        self.say(f"step {row['step']} writes: {first[0] if first else ''}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
