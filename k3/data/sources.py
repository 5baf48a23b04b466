"""Where documents come from: the pinned packages, site-packages, a folder, a text file, JSONL,
Parquet.

A source lists its documents by name without reading more than it must, and reads any one of them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3 import UserError

DEFAULT_PACKAGES = (
    "torch",
    "numpy",
    "sympy",
    "mpmath",
    "networkx",
    "setuptools",
    "huggingface-hub",
    "pygments",
    "rich",
    "typer",
    "click",
    "jinja2",
    "fsspec",
    "filelock",
    "markdown-it-py",
    "anyio",
    "requests",
    "urllib3",
    "packaging",
    "tqdm",
)
"""What a core install brings and whose Python source is the same on every platform."""

_VARIES = (
    "torch/version.py",
    "torch/testing/_internal/generated/",
    "numpy/__config__.py",
    "numpy/distutils/",
)
"""Files written by the build, or shipped for some Python versions only."""

_PIECE_BYTES = 16_384
_BLANK_LINE = re.compile(rb"\n[ \t]*\r?\n")


@dataclass(frozen=True)
class Entry:
    """A document's name within its corpus, and how to read its bytes."""

    path: str
    read: Callable[[], bytes]


def list_documents(source: str) -> list[Entry]:
    """The documents of `source`, in any order, each path once.

    `source` is "default", "site-packages", a folder, a `.jsonl` file (field "text", optionally
    "path"), a `.parquet` file (column "text"), or any other file, which is cut at blank lines into
    documents of about 16 KiB. UserError if it does not exist or cannot be read.
    """
    if source == "default":
        return default_documents()
    if source == "site-packages":
        root = Path(sysconfig.get_paths()["purelib"])
        return [entry for entry in _folder(root) if entry.path.endswith(".py")]
    place = Path(source).expanduser()
    if place.is_dir():
        return _folder(place)
    if not place.is_file():
        raise UserError(
            f"data source {source!r} is no file or folder, nor one of 'default', 'site-packages'"
        )
    readers = {".jsonl": _jsonl, ".parquet": _parquet}
    return readers.get(place.suffix, _pieces)(place)


def pinned_versions() -> dict[str, str]:
    """Package name to version, from the constraints file that this package ships."""
    text = importlib.resources.files("k3").joinpath("constraints.txt").read_text(encoding="utf-8")
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return dict(line.split("==", 1) for line in lines if line)


def default_documents(
    packages: tuple[str, ...] = DEFAULT_PACKAGES, pins: dict[str, str] | None = None
) -> list[Entry]:
    """Python files of the pinned packages, named as below site-packages.

    UserError names a package that is absent or not at its pin. A local version ("2.13.0+cpu") is
    the same source.
    """
    pins = pinned_versions() if pins is None else pins
    entries = []
    for package in packages:
        try:
            found = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            raise UserError(
                f"default corpus: {package} is not installed, "
                f"k3/constraints.txt pins {pins[package]}"
            ) from None
        if found.version.split("+")[0] != pins[package]:
            raise UserError(
                f"default corpus: {package} is {found.version}, "
                f"k3/constraints.txt pins {pins[package]}"
            )
        entries += [_file(name, Path(str(place))) for name, place in _python_files(found)]
    return entries


def _python_files(package: importlib.metadata.Distribution) -> Iterator[tuple[str, Any]]:
    for file in package.files or ():
        name = file.as_posix()
        if name.endswith(".py") and not name.startswith(("../", *_VARIES)):
            yield name, file.locate()


def _file(name: str, place: Path) -> Entry:
    def read() -> bytes:
        try:
            return place.read_bytes()
        except OSError as error:
            raise UserError(f"{place}: cannot be read ({error.strerror})") from None

    return Entry(name, read)


def _folder(root: Path) -> list[Entry]:
    """Every file below `root` but hidden ones; links are not followed."""
    entries = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            place = Path(folder, name)
            if not name.startswith(".") and place.is_file() and not place.is_symlink():
                entries.append(_file(place.relative_to(root).as_posix(), place))
    return entries


def _pieces(place: Path) -> list[Entry]:
    data = _file(place.name, place).read()
    edges = [0]
    for blank in _BLANK_LINE.finditer(data):
        if blank.end() - edges[-1] >= _PIECE_BYTES:
            edges.append(blank.end())
    edges.append(len(data))

    def entry(number: int) -> Entry:
        piece = data[edges[number] : edges[number + 1]]
        return Entry(f"{place.name}#{number:06d}", lambda: piece)

    return [entry(number) for number in range(len(edges) - 1)]


def _jsonl(place: Path) -> list[Entry]:
    entries: dict[str, Entry] = {}
    offset = 0
    try:
        with open(place, "rb") as handle:
            for number, line in enumerate(handle, start=1):
                if line.strip():
                    own = f"{place.name}:{number:09d}"
                    path = str(_row(place, number, line).get("path") or own)
                    name = path if path not in entries else f"{path}#{own}"
                    entries[name] = Entry(name, _line_reader(place, number, offset))
                offset += len(line)
    except OSError as error:
        raise UserError(f"{place}: cannot be read ({error.strerror})") from None
    return list(entries.values())


def _line_reader(place: Path, number: int, offset: int) -> Callable[[], bytes]:
    def read() -> bytes:
        try:
            with open(place, "rb") as handle:
                handle.seek(offset)
                line = handle.readline()
        except OSError as error:
            raise UserError(f"{place}: cannot be read ({error.strerror})") from None
        text: str = _row(place, number, line)["text"]
        # A lone surrogate in JSON is no text; its document is then skipped as invalid.
        return text.encode("utf-8", errors="surrogatepass")

    return read


def _row(place: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        raise UserError(f"{place}: line {number} is not JSON") from None
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise UserError(f"{place}: line {number} has no string field 'text'")
    return row


def _parquet(place: Path) -> list[Entry]:
    """The text column is held in memory; rows without text are left out."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{place}: reading Parquet needs pyarrow, which is not installed") from None
    try:
        column = pyarrow.parquet.read_table(place, columns=["text"]).column("text")
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
        raise UserError(f"{place}: no readable column 'text' ({_first_line(error)})") from None

    def entry(number: int) -> Entry:
        return Entry(f"{place.name}:{number:09d}", lambda: str(column[number].as_py()).encode())

    return [entry(number) for number in range(len(column)) if column[number].is_valid]


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
