"""The endless token stream, its spans and targets, against a plain reading of the documents."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3.data.batch import IGNORE
from k3.data.packing import Packing, Piece, cut, pack
from k3.data.tokens import TokenStore

PAD = 999_999


def store_of(lengths: list[int]) -> TokenStore:
    """Documents whose tokens say who they are: 1000 * document + place."""
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    tokens = np.concatenate([1000 * i + np.arange(n) for i, n in enumerate(lengths)])
    return TokenStore(tokens.astype(np.uint32), offsets, np.array(lengths), {})


documents = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(documents, st.integers(1, 50), st.integers(0, 2**63), st.integers(0, 5), st.integers(1, 50))
def test_each_epoch_reads_every_token_once(
    lengths, pack_tokens: int, seed: int, epoch: int, context: int
):
    packing = Packing(np.array(lengths), seed)
    total = packing.epoch_tokens
    first, last = epoch * total // pack_tokens, -(-(epoch + 1) * total // pack_tokens)
    read = [
        (piece.document, piece.start + i)
        for number in range(first, last)
        for piece in packing.pieces(number * pack_tokens, pack_tokens, context)
        for i in range(piece.length)
    ]
    inside = read[epoch * total - first * pack_tokens :][:total]
    assert sorted(inside) == [(i, p) for i, n in enumerate(lengths) for p in range(n)]


@settings(max_examples=200, deadline=None)
@given(documents, st.integers(0, 400), st.integers(1, 90), st.integers(1, 90), st.integers(1, 50))
def test_any_stretch_equals_its_parts(
    lengths, position: int, first: int, second: int, context: int
):
    packing = Packing(np.array(lengths), seed=3)

    def read(start: int, count: int) -> list[tuple[int, int]]:
        pieces = packing.pieces(start, count, context)
        return [(piece.document, piece.start + i) for piece in pieces for i in range(piece.length)]

    assert read(position, first) + read(position + first, second) == read(position, first + second)


def test_epochs_and_seeds_differ_and_never_change():
    packing = Packing(np.full(8, 2), seed=7)

    def order(packing: Packing, epoch: int) -> list[int]:
        return [piece.document for piece in packing.pieces(epoch * 16, 16, 2)]

    assert order(packing, 0) != order(packing, 1) != order(packing, 2)
    assert order(Packing(np.full(8, 2), seed=8), 0) != order(packing, 0)
    # Written down, so that an update of numpy or of this file cannot reorder a run in progress.
    assert order(packing, 0) == [1, 3, 2, 4, 7, 0, 6, 5]
    assert order(packing, 1) == [6, 5, 4, 2, 7, 3, 1, 0]


def test_a_batch_holds_windows_of_many_documents():
    packing = Packing(np.full(10, 1000), seed=0)
    pieces = list(packing.pieces(0, 1000, 100))
    assert [piece.length for piece in pieces] == [100] * 10
    assert len({piece.document for piece in pieces}) > 4


def test_the_next_epoch_begins_at_a_multiple():
    packing = Packing(np.array([5, 3]), seed=0)
    assert [packing.next_epoch(position) for position in (0, 1, 8, 9)] == [0, 8, 8, 16]


def test_the_order_is_well_mixed():
    places = np.zeros((6, 6))
    for seed in range(3000):
        for place, piece in enumerate(Packing(np.ones(6, dtype=np.int64), seed).pieces(0, 6, 1)):
            places[piece.document, place] += 1
    assert np.abs(places / 500 - 1).max() < 0.2


@settings(max_examples=200, deadline=None)
@given(documents, st.integers(0, 400), st.integers(1, 90), st.integers(1, 33))
def test_batch_laws(lengths, position: int, tokens: int, context: int):
    store = store_of(lengths)
    packing = Packing(store.lengths, seed=1)
    pieces = list(packing.pieces(position, tokens, context))
    batch = pack(store, pieces, PAD)
    ids = batch.ids_T.tolist()
    assert batch.num_tokens == batch.spans.num_tokens == tokens
    assert 0 < batch.spans.max_len <= context and min(batch.spans.lengths) > 0

    for t, token in enumerate(ids):
        document, place = divmod(token, 1000)
        following = [token + n if place + n < lengths[document] else IGNORE for n in (1, 2)]
        assert [batch.targets_T[t].item(), batch.targets2_T[t].item()] == following
        assert batch.next_ids_T[t].item() == (PAD if following[0] == IGNORE else following[0])

    # A span is one document's run; it ends at a document's edge, a context multiple or the end.
    edges = batch.spans.offsets
    for start, stop in zip(edges, edges[1:], strict=False):
        assert ids[start:stop] == list(range(ids[start], ids[start] + stop - start))
        document, place = divmod(ids[stop - 1], 1000)
        ends = (place + 1 == lengths[document], (place + 1) % context == 0, stop == tokens)
        assert any(ends)
        assert start == 0 or ids[start] % 1000 % context == 0


def test_a_context_cut_loses_no_target():
    store = store_of([10, 3])
    whole = [Piece(0, 0, 10), Piece(1, 0, 3)]
    small, large = (
        pack(store, [part for piece in whole for part in cut(piece, context)], PAD)
        for context in (4, 100)
    )
    assert small.spans.lengths == (4, 4, 2, 3) and large.spans.lengths == (10, 3)
    for name in ("ids_T", "targets_T", "next_ids_T", "targets2_T"):
        assert getattr(small, name).tolist() == getattr(large, name).tolist()
    # The wrong way, a target only within the span, would lose two of these eleven.
    assert (small.targets_T != IGNORE).sum() == 11


def test_cuts_count_from_the_documents_start():
    assert [piece.length for piece in cut(Piece(0, 5, 12), 8)] == [3, 8, 1]
    assert [piece.length for piece in cut(Piece(0, 8, 8), 8)] == [8]


def test_a_batch_moves_and_is_int64():
    batch = pack(store_of([5]), [Piece(0, 0, 5)], PAD).to("cpu")
    assert {str(t.dtype) for t in (batch.ids_T, batch.targets_T, batch.next_ids_T)} == {
        "torch.int64"
    }


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_empty_documents_are_our_mistake(lengths):
    with pytest.raises(AssertionError):
        Packing(np.array(lengths, dtype=np.int64), 0)
