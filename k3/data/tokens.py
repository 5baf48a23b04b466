"""A corpus as token ids on disk: written once, mapped into memory, whole or absent.

A store is a folder: `tokens.bin` (uint16 or uint32, documents one after another, each ended by
[EOS]), `index.bin` (int64: N+1 token offsets, then N byte lengths), `meta.json`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from k3 import UserError
from k3.data.cache import open_or_build
from k3.data.corpus import Progress
from k3.text.control import EOS
from k3.text.tokenizer import Tokenizer

FORMAT = 1
_GROUP_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class TokenStore:
    """N documents as ids. `tokens` holds all, document i is tokens[offsets[i] : offsets[i+1]]."""

    tokens: npt.NDArray[Any]
    offsets: npt.NDArray[np.int64]
    """[N+1]."""
    byte_lengths: npt.NDArray[np.int64]
    """[N]: UTF-8 bytes of each document, its end token not counted."""
    meta: dict[str, Any]

    @property
    def num_documents(self) -> int:
        return len(self.byte_lengths)

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[N]: tokens of each document, with its end token."""
        return np.diff(self.offsets)

    @classmethod
    def open(cls, folder: Path) -> TokenStore:
        """Opens a store and checks sizes and checksums. UserError names the file and what is
        wrong."""
        meta = _read_meta(folder / "meta.json")
        for name in ("tokens.bin", "index.bin"):
            _check_file(folder / name, meta["files"][name])
        count = meta["documents"]
        index = np.fromfile(folder / "index.bin", dtype="<i8")
        tokens = np.memmap(folder / "tokens.bin", dtype=meta["dtype"], mode="r")
        return cls(tokens, index[: count + 1], index[count + 1 :], meta)


def token_store(
    folder: Path,
    corpus_sha256: str,
    texts: Callable[[], Iterable[str]],
    tokenizer: Tokenizer,
    *,
    threads: int = 1,
    total_bytes: int = 0,
    progress: Progress | None = None,
) -> TokenStore:
    """Opens the store at `folder`, or tokenises `texts()` into it.

    A damaged store, or one of another corpus or tokenizer, is built anew. `total_bytes` is for
    `progress` only.
    """
    identity = {"corpus": corpus_sha256, "tokenizer": tokenizer.fingerprint}

    def opener(where: Path) -> TokenStore:
        store = TokenStore.open(where)
        for name, value in identity.items():
            if store.meta[name] != value:
                raise UserError(f"{where}: made from {name} {store.meta[name]}, this is {value}")
        return store

    def writer(where: Path) -> None:
        counted = _counted(texts(), total_bytes, progress)
        _write(where, counted, tokenizer, identity, threads)

    return open_or_build(folder, opener, writer)


def _counted(texts: Iterable[str], total: int, progress: Progress | None) -> Iterator[str]:
    done = 0
    for text in texts:
        yield text
        done += len(text)
        if progress:
            progress("tokenise", min(done, total), total)


def _write(
    folder: Path,
    texts: Iterable[str],
    tokenizer: Tokenizer,
    identity: dict[str, str],
    threads: int,
) -> None:
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    end = tokenizer.encode_control(EOS)
    offsets, byte_lengths = [0], []
    with open(folder / "tokens.bin", "wb") as handle:
        for group in _groups(texts):
            for text, ids in zip(group, tokenizer.encode_batch(group, threads), strict=True):
                np.array([*ids, end], dtype=dtype).tofile(handle)
                offsets.append(offsets[-1] + len(ids) + 1)
                byte_lengths.append(len(text.encode()))
    np.array(offsets + byte_lengths, dtype="<i8").tofile(folder / "index.bin")
    meta = {
        "format": FORMAT,
        **identity,
        "vocab_size": tokenizer.vocab_size,
        "dtype": dtype.str,
        "documents": len(byte_lengths),
        "tokens": offsets[-1],
        "files": {name: _facts(folder / name) for name in ("tokens.bin", "index.bin")},
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")


def _groups(texts: Iterable[str]) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _facts(path: Path) -> dict[str, int]:
    with open(path, "rb") as handle:
        return {"size": path.stat().st_size, "crc32": _crc(handle)}


def _crc(handle: BinaryIO) -> int:
    value = 0
    while block := handle.read(1 << 22):
        value = zlib.crc32(block, value)
    return value


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        known = meta["format"] == FORMAT and meta.keys() >= {"corpus", "tokenizer", "files"}
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path}: is not a token store's description") from None
    if not known:
        raise UserError(f"{path}: format {meta['format']!r}, this version reads {FORMAT}")
    return dict(meta)


def _check_file(path: Path, expected: dict[str, int]) -> None:
    try:
        found = _facts(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    for what, value in expected.items():
        if found[what] != value:
            raise UserError(f"{path}: {what} is {found[what]}, its description says {value}")
