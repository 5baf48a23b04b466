"""Windows of documents on an endless token stream, and any stretch of it as a batch, without
reading what lies before.

A window is what one span may see: `context` tokens of a document, or its shorter rest. The stream
is epoch after epoch of all windows, each epoch in its own order, so that one batch holds windows of
many documents: neighbours of one file in one batch would make its gradient that of a single file.
Pack i of T tokens is the stretch [i*T, (i+1)*T); every token of an epoch is read exactly once, and
only a position needs to be kept. Another context cuts other windows, so it begins at the next
epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from k3.data.batch import IGNORE, Batch
from k3.data.tokens import TokenStore
from k3.ops.spans import Spans

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Piece:
    """Tokens [start, start + length) of a document."""

    document: int
    start: int
    length: int


class Packing:
    """The order of windows in every epoch: a keyed sort, so it needs no generator state and never
    changes."""

    def __init__(self, lengths: Ints, seed: int) -> None:
        assert len(lengths) and lengths.min() > 0, "every document has at least its end token"
        self._lengths = lengths
        self._seed = seed
        self.epoch_tokens = int(lengths.sum())
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def _make_epoch(self, epoch: int, context: int) -> tuple[Ints, Ints, Ints]:
        """Document and start of each window in reading order, and the stream edges between them."""
        counts = -(-self._lengths // context)
        document = np.repeat(np.arange(len(counts)), counts)
        inside = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
        start = inside * context
        size = np.minimum(context, self._lengths[document] - start)
        order = np.argsort(_keys(len(document), self._seed, epoch), kind="stable")
        edges = np.concatenate(([0], np.cumsum(size[order])))
        return document[order], start[order], edges.astype(np.int64)

    def next_epoch(self, position: int) -> int:
        """The first position at or after `position` where an epoch begins."""
        return -(-position // self.epoch_tokens) * self.epoch_tokens

    def pieces(self, position: int, count: int, context: int) -> Iterator[Piece]:
        """The windows, or parts of them, that make up `count` tokens of the stream from `position`
        on. O(log n) to find."""
        while count > 0:
            epoch, inside = divmod(position, self.epoch_tokens)
            document, start, edges = self._epoch(epoch, context)
            place = int(np.searchsorted(edges, inside, side="right")) - 1
            skipped = inside - int(edges[place])
            length = min(count, int(edges[place + 1]) - inside)
            yield Piece(int(document[place]), int(start[place]) + skipped, length)
            position, count = position + length, count - length


def _keys(count: int, seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    """One splitmix64 word per window. NumPy's own generators may change their streams between
    versions."""
    with np.errstate(over="ignore"):
        root = _mix(_mix(np.uint64(seed % 2**64)) + np.uint64(epoch))
        words: npt.NDArray[np.uint64] = _mix(root + np.arange(count, dtype=np.uint64))
    return words


def _mix(word: Any) -> Any:
    word = word + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


def cut(piece: Piece, context: int) -> Iterator[Piece]:
    """Cuts a piece at every multiple of `context` tokens from the document's start."""
    start, end = piece.start, piece.start + piece.length
    while start < end:
        stop = min(end, start - start % context + context)
        yield Piece(piece.document, start, stop - start)
        start = stop


def pack(store: TokenStore, pieces: Sequence[Piece], pad_id: int) -> Batch:
    """Lays pieces on one token axis, a span each."""
    rows = [_with_following(store, piece) for piece in pieces]
    columns = zip(*rows, strict=True)
    ids, following, after = (torch.from_numpy(np.concatenate(column)) for column in columns)
    return Batch(
        ids_T=ids,
        targets_T=following,
        next_ids_T=torch.where(following == IGNORE, pad_id, following),
        targets2_T=after,
        spans=Spans.from_lengths([piece.length for piece in pieces]),
    )


def _with_following(store: TokenStore, piece: Piece) -> tuple[Ints, Ints, Ints]:
    """The piece's tokens, and for each the next and next but one of its document (-100 past the
    end)."""
    begin = int(store.offsets[piece.document]) + piece.start
    end = int(store.offsets[piece.document + 1])
    window = np.full(piece.length + 2, IGNORE, dtype=np.int64)
    known = store.tokens[begin : min(begin + piece.length + 2, end)]
    window[: len(known)] = known
    return window[:-2], window[1:-1], window[2:]
