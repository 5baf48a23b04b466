"""A folder of safetensors files as one table of tensors: checked by headers, read one by one.

Both forms are read: `model.safetensors.index.json` with the files it names, and a lone
`model.safetensors`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from k3 import UserError
from k3.checkpoint.tensorfile import DTYPES

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
LONGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies and what its header says of it."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Shards:
    """The tensors of a checkpoint folder. Making it reads every header and no value.

    UserError names the file or tensor if one is missing, truncated or not where the index says.
    strict: also if a file holds tensors that the index doesn't name, or the index's total_size is
    not the sum of the tensors.
    """

    def __init__(self, folder: Path, strict: bool = True) -> None:
        self.folder = folder
        self.tensors: dict[str, Stored] = {}
        index = folder / INDEX
        if index.is_file():
            self._read_indexed(index, strict)
        elif (folder / SINGLE).is_file():
            self.tensors = read_header(folder / SINGLE)
        else:
            raise UserError(f"{folder}: has neither {INDEX} nor {SINGLE}")

    def _read_indexed(self, index: Path, strict: bool) -> None:
        content = read_json(index)
        places = content.get("weight_map")
        if not isinstance(places, dict):
            raise UserError(f"{index}: weight_map must be an object, got {places!r:.60}")
        found: dict[str, dict[str, Stored]] = {}
        for name, file in places.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise UserError(f"{index}: {name} must be in a file of this folder, got {file!r}")
            if file not in found:
                found[file] = read_header(self.folder / file, f"the index places {name} in it")
            if name not in found[file]:
                raise UserError(f"{self.folder / file}: has no {name}, the index places it there")
            self.tensors[name] = found[file][name]
        if strict:
            _check_index(index, content, self.tensors, found)

    @contextmanager
    def reading(self) -> Iterator[Reader]:
        """Opens files as they're needed, one at a time."""
        reader = Reader(self)
        try:
            yield reader
        finally:
            reader.close()


class Reader:
    """Keeps one file open, so that memory holds the pages of one."""

    def __init__(self, shards: Shards) -> None:
        self._shards, self._file = shards, ""
        self._open: Any = None

    def get(self, name: str) -> Tensor:
        """The tensor on the CPU; valid until another file's is asked for."""
        file = self._shards.tensors[name].file
        path = self._shards.folder / file
        try:
            if file != self._file:
                self.close()
                self._open, self._file = safe_open(path, framework="pt").__enter__(), file
            tensor: Tensor = self._open.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: {name} cannot be read ({error})") from error
        return tensor

    def close(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open, self._file = None, ""


def read_header(path: Path, reason: str = "") -> dict[str, Stored]:
    """The tensors of one safetensors file. UserError if it's missing, cut short or no such file."""
    if not path.is_file():
        raise UserError(f"{path}: missing" + (f", {reason}" if reason else ""))
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LONGEST_HEADER):
            raise UserError(f"{path}: truncated, {size} bytes, its header alone has {length}")
        text = file.read(length)
    try:
        table = json.loads(text)
        tensors = {n: _stored(path.name, e) for n, e in table.items() if n != "__metadata__"}
        end = max((e["data_offsets"][1] for n, e in table.items() if n in tensors), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a safetensors file ({error!r})") from None
    if size != 8 + length + end:
        kind = "truncated" if size < 8 + length + end else "too long"
        raise UserError(f"{path}: {kind}, {size} bytes, its header says {8 + length + end}")
    return tensors


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file. UserError if it's missing or something else."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path}: missing") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: must be a JSON object, got {type(content).__name__}")
    return content


def _stored(file: str, entry: dict[str, Any]) -> Stored:
    start, end = entry["data_offsets"]
    shape, dtype = tuple(entry["shape"]), entry["dtype"]
    if dtype in DTYPES and prod(shape) * DTYPES[dtype].itemsize != end - start:
        raise ValueError(f"{dtype} {shape} in {end - start} bytes")
    return Stored(file, dtype, shape, end - start)


def _check_index(
    index: Path,
    content: dict[str, Any],
    tensors: dict[str, Stored],
    found: dict[str, dict[str, Stored]],
) -> None:
    for file, inside in found.items():
        for name in inside:
            if name not in tensors:
                raise UserError(f"{index.parent / file}: holds {name}, the index doesn't name it")
            if tensors[name].file != file:
                raise UserError(f"{index}: {name} is in {tensors[name].file} and in {file}")
    metadata = content.get("metadata") or {}
    total, expected = sum(t.nbytes for t in tensors.values()), metadata.get("total_size")
    if expected is not None and expected != total:
        raise UserError(f"{index}: total_size is {expected}, its tensors have {total} bytes")
