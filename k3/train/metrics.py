"""What a run leaves for people: `metrics.jsonl` and `samples.jsonl`, a line at a time, and
TensorBoard if wanted.
"""

from __future__ import annotations

import importlib.util
import json
import resource
import sys
from pathlib import Path
from typing import IO, Any

import torch

from k3 import UserError

Row = dict[str, Any]


class JsonLines:
    """Appends rows to a file, each flushed; opening it drops the rows after `step`, and a torn last
    line.
    """

    def __init__(self, path: Path, step: int) -> None:
        path.touch()
        with open(path, "r+b") as handle:
            handle.truncate(_length_up_to(handle, step))
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Row) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _length_up_to(handle: IO[bytes], step: int) -> int:
    """Bytes of the leading whole rows whose step is at most `step`."""
    length = 0
    for line in handle:
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n") or row["step"] > step:
            break
        length += len(line)
    return length


class Board:
    """TensorBoard's scalars, where the package is there."""

    def __init__(self, folder: Path, wanted: str) -> None:
        self._writer = None
        if wanted == "off" or (wanted == "auto" and not _has_tensorboard()):
            return
        if not _has_tensorboard():
            raise UserError("tensorboard: on, but the package tensorboard is not installed")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def write(self, row: Row) -> None:
        if self._writer is None:
            return
        for key, value in row.items():
            if isinstance(value, (int, float)) and key != "step":
                self._writer.add_scalar(key, value, row["step"])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _has_tensorboard() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


def memory_mb(device: torch.device) -> float:
    """Peak memory so far in MB: of the device on CUDA, else resident memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
