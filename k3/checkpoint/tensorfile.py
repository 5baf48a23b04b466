"""Writes a safetensors file tensor by tensor, so that a file larger than memory can be made.

The library's own writer wants every tensor at once and hides the system's error number; this one
takes a tensor only when its turn comes, hashes while it writes and leaves with the file on disk.
Reading is the library's. Format: 8-byte header length, JSON header, then the values, little endian.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
CHUNK = 1 << 24


@dataclass(frozen=True)
class Entry:
    """One tensor to write; `value` makes it when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    value: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class Written:
    bytes: int
    sha256: str


def entries(tensors: Mapping[str, Tensor]) -> list[Entry]:
    return [Entry(name, tuple(t.shape), t.dtype, t.detach) for name, t in tensors.items()]


def write_tensors(
    path: Path, tensors: Iterable[Entry], metadata: Mapping[str, str] | None = None
) -> Written:
    """Makes `path` with the tensors in it and returns its size and hash; the file is synced.

    Wider dtypes come first, so that every value is aligned. Raises OSError as the system does,
    ValueError if a made tensor is not as its entry says.
    """
    ordered = sorted(tensors, key=lambda entry: (-entry.dtype.itemsize, entry.name))
    with _Sink(path) as sink:
        sink.write(_header(ordered, metadata or {}))
        for entry in ordered:
            sink.write(_values(entry))
    return sink.written


def write_bytes(path: Path, data: bytes) -> Written:
    """Makes `path` and syncs it."""
    with _Sink(path) as sink:
        sink.write(data)
    return sink.written


def hash_file(path: Path) -> Written:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return Written(size, digest.hexdigest())


class _Sink:
    """A new file that is hashed while it is written and synced when it is closed."""

    def __init__(self, path: Path) -> None:
        self.path, self.size, self.digest = path, 0, hashlib.sha256()

    def __enter__(self) -> _Sink:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0)
        self.fd = os.open(self.path, flags, 0o666)
        return self

    def __exit__(self, kind: type | None, *rest: Any) -> None:
        try:
            if kind is None:
                os.fsync(self.fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        finally:
            os.close(self.fd)

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            try:
                count = os.write(self.fd, view[:CHUNK])
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.path)) from error
            self.digest.update(view[:count])
            self.size += count
            view = view[count:]

    @property
    def written(self) -> Written:
        return Written(self.size, self.digest.hexdigest())


def _header(ordered: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for entry in ordered:
        if entry.name in table:
            raise ValueError(f"{entry.name} is given twice")
        table[entry.name] = {
            "dtype": NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, start + entry.nbytes],
        }
        start += entry.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _values(entry: Entry) -> memoryview:
    tensor = entry.value()
    if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
        raise ValueError(
            f"{entry.name}: declared {entry.dtype} {entry.shape}, "
            f"made {tensor.dtype} {tuple(tensor.shape)}"
        )
    flat = tensor.cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
