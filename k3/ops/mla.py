"""Causal attention over packed documents, expanded for training and absorbed (over pages) for
decoding.

`attention` keeps no [T, T] matrix: it walks blocks of queries, and its backward recomputes the
probabilities from the saved log-sum-exp. Documents of one length are computed as one batch.
Source: Kimi K3 report §2.1.2 (attention output kept in fp32; no positions).

Legend: T tokens, N spans, H heads, D query/key width, V value width, G = spans x heads of a batch,
L length of its spans, Q queries of a block, P pages, B rows of a page, R latent row width, M pages
of a request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from k3.ops.product import accumulate, product, wide, without_autocast
from k3.ops.spans import Spans

BLOCK_ELEMENTS = 1 << 19
"""Logits of one block on a CPU: what is between the two products should stay in the cache."""


def attention(
    q_THD: Tensor, k_THD: Tensor, v_THV: Tensor, spans: Spans, *, scale: float
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v, causal inside each span.

    q, k [T, H, D], v [T, H, V] -> (o [T, H, V] fp32, max_logit [H] fp32 detached, the largest
    scaled logit over valid tokens, -inf without any); fp64 inputs give fp64. Padding gets zeros and
    no gradient. Raises ValueError on shapes that do not fit.
    """
    if q_THD.shape != k_THD.shape or q_THD.shape[:2] != v_THV.shape[:2]:
        raise ValueError(
            f"q {tuple(q_THD.shape)}, k {tuple(k_THD.shape)}, v {tuple(v_THV.shape)} do not fit"
        )
    if spans.num_tokens != q_THD.shape[0]:
        raise ValueError(f"spans cover {spans.num_tokens} tokens, q has {q_THD.shape[0]}")
    o_THV, max_H = _Attention.apply(q_THD, k_THD, v_THV, spans, scale)
    return o_THV, max_H


def _groups(spans: Spans) -> list[tuple[int, list[int]]]:
    """(length, starts) of the spans that hold tokens, padding left out."""
    starts: dict[int, list[int]] = {}
    last = spans.num_spans - bool(spans.padding)
    for start, length in zip(spans.offsets[:last], spans.lengths[:last], strict=True):
        if length:
            starts.setdefault(length, []).append(start)
    return list(starts.items())


def _batches(spans: Spans, heads: int, cpu: bool) -> Iterator[tuple[int, list[int]]]:
    """Groups cut so that one block of queries of the batch stays near BLOCK_ELEMENTS logits."""
    for length, starts in _groups(spans):
        rows = min(length, 64)
        limit = BLOCK_ELEMENTS if cpu else 1 << 28
        count = max(1, limit // (rows * length * heads))
        for i in range(0, len(starts), count):
            yield length, starts[i : i + count]


def _blocks(length: int, group: int, cpu: bool) -> Iterator[tuple[int, int]]:
    """Query blocks (start, stop) of a batch."""
    limit = BLOCK_ELEMENTS if cpu else 1 << 28
    rows = max(32, min(128 if cpu else 512, limit // (group * length)))
    for start in range(0, length, rows):
        yield start, min(start + rows, length)


def _take(x_THD: Tensor, starts: list[int], length: int, dtype: torch.dtype) -> Tensor:
    """[G, L, D] contiguous copy of the spans at `starts`."""
    _, heads, width = x_THD.shape
    count, first = len(starts), starts[0]
    if starts[-1] == first + (count - 1) * length:
        x = x_THD[first : first + count * length].view(count, length, heads, width)
    else:
        x = torch.stack([x_THD[start : start + length] for start in starts])
    return x.transpose(1, 2).to(dtype).reshape(count * heads, length, width)


def _put(out_THD: Tensor, x_GLD: Tensor, starts: list[int]) -> None:
    """The inverse of `_take`."""
    heads, length = out_THD.shape[1], x_GLD.shape[1]
    x_NLHD = x_GLD.view(len(starts), heads, length, -1).transpose(1, 2)
    if starts[-1] == starts[0] + (len(starts) - 1) * length:
        stop = starts[0] + len(starts) * length
        out_THD[starts[0] : stop].view(x_NLHD.shape).copy_(x_NLHD)
        return
    for start, x_LHD in zip(starts, x_NLHD, strict=True):
        out_THD[start : start + length].copy_(x_LHD)


def _scores(q_GLD: Tensor, k_GLD: Tensor, start: int, stop: int, scale: float) -> Tensor:
    """Scaled logits of queries start..stop against keys 0..stop, future keys at -inf."""
    s_GQL = product(q_GLD[:, start:stop], k_GLD[:, :stop].mT).mul_(scale)
    rows = stop - start
    future_QQ = torch.full((rows, rows), -torch.inf, dtype=s_GQL.dtype, device=s_GQL.device).triu_(
        1
    )
    s_GQL[:, :, start:] += future_QQ
    return s_GQL


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, k_THD: Tensor, v_THV: Tensor, spans: Spans, scale: float
    ) -> tuple[Tensor, Tensor]:
        tokens, heads, _ = q_THD.shape
        dtype = wide(q_THD.dtype)
        narrow = q_THD.dtype if q_THD.is_cuda else dtype
        o_THV = torch.zeros(v_THV.shape, dtype=dtype, device=q_THD.device)
        lse_TH1 = torch.zeros(tokens, heads, 1, dtype=dtype, device=q_THD.device)
        max_H = torch.full((heads,), -torch.inf, dtype=dtype, device=q_THD.device)
        with without_autocast(q_THD):
            for length, starts in _batches(spans, heads, not q_THD.is_cuda):
                q, k, v = (_take(x, starts, length, narrow) for x in (q_THD, k_THD, v_THV))
                o, lse, top = _forward(q, k, v, scale)
                _put(o_THV, o, starts)
                _put(lse_TH1, lse, starts)
                max_H = torch.maximum(max_H, top.view(-1, heads, length).amax((0, 2)))
        ctx.save_for_backward(q_THD, k_THD, v_THV, o_THV, lse_TH1)
        ctx.spans, ctx.scale = spans, scale
        ctx.mark_non_differentiable(max_H)
        return o_THV, max_H

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q_THD, k_THD, v_THV, o_THV, lse_TH1 = ctx.saved_tensors
        dtype = o_THV.dtype
        narrow = q_THD.dtype if q_THD.is_cuda else dtype
        do_THV = grads[0]
        delta_TH1 = (do_THV * o_THV).sum(-1, keepdim=True)
        dq, dk, dv = (torch.zeros_like(x) for x in (q_THD, k_THD, v_THV))
        for length, starts in _batches(ctx.spans, q_THD.shape[1], not q_THD.is_cuda):
            q, k, v, do = (_take(x, starts, length, narrow) for x in (q_THD, k_THD, v_THV, do_THV))
            lse, delta = (_take(x, starts, length, dtype) for x in (lse_TH1, delta_TH1))
            for out, part in zip(
                (dq, dk, dv), _backward(q, k, v, do, lse, delta, ctx.scale), strict=True
            ):
                _put(out, part, starts)
        return dq, dk, dv, None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(o_GLV, lse_GL1, max_GL1) of one batch of equal spans."""
    group, length, _ = q.shape
    dtype = wide(q.dtype)
    o_GLV = torch.empty(group, length, v.shape[2], dtype=dtype, device=q.device)
    lse_GL1 = torch.empty(group, length, 1, dtype=dtype, device=q.device)
    max_GL1 = torch.empty_like(lse_GL1)
    for start, stop in _blocks(length, group, not q.is_cuda):
        s_GQL = _scores(q, k, start, stop, scale)
        top_GQ1 = s_GQL.amax(-1, keepdim=True)
        p_GQL = s_GQL.sub_(top_GQ1).exp_()
        sum_GQ1 = p_GQL.sum(-1, keepdim=True)
        o_GLV[:, start:stop] = product(p_GQL.to(v.dtype), v[:, :stop]).div_(sum_GQ1)
        lse_GL1[:, start:stop] = sum_GQ1.log_().add_(top_GQ1)
        max_GL1[:, start:stop] = top_GQ1
    return o_GLV, lse_GL1, max_GL1


def _backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of one batch of equal spans, in the wide type."""
    group, length, _ = q.shape
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v))
    for start, stop in _blocks(length, group, not q.is_cuda):
        rows = slice(start, stop)
        p_GQL = _scores(q, k, start, stop, scale).sub_(lse[:, rows]).exp_()
        accumulate(dv[:, :stop], p_GQL.to(v.dtype).mT, do[:, rows])
        ds_GQL = product(do[:, rows], v[:, :stop].mT).sub_(delta[:, rows]).mul_(p_GQL)
        ds_GQL = ds_GQL.mul_(scale).to(q.dtype)
        dq[:, rows] = product(ds_GQL, k[:, :stop])
        accumulate(dk[:, :stop], ds_GQL.mT, q[:, rows])
    return dq, dk, dv


def write_rows(
    rows_TR: Tensor, pages_PBR: Tensor, table_NM: Tensor, length_N: Tensor, spans: Spans
) -> None:
    """Stores row i of span n at position length[n] + i of that request, in place; padding is
    skipped.

    pages [P, B, R], table int [N, M] (page of each B positions), length int [N] before the new
    rows. Raises IndexError where a position has no page.
    """
    tokens = spans.num_tokens - spans.padding
    if tokens == 0:
        return
    size = pages_PBR.shape[1]
    segment_T = spans.segments()[:tokens]
    position_T = length_N.to(torch.int64)[segment_T] + spans.positions()[:tokens]
    page_T = table_NM.to(torch.int64)[segment_T, position_T // size]
    slot_T = page_T * size + position_T % size
    flat = pages_PBR.view(-1, pages_PBR.shape[2])
    flat.index_copy_(0, slot_T, rows_TR[:tokens].to(pages_PBR.dtype))


def latent_attention(
    q_THR: Tensor,
    pages_PBR: Tensor,
    table_NM: Tensor,
    length_N: Tensor,
    spans: Spans,
    *,
    scale: float,
    value_dim: int,
) -> tuple[Tensor, Tensor]:
    """The absorbed form: one latent row serves all heads as key (R) and as value (first
    `value_dim`).

    q [T, H, R] with W_UK folded in; the rows of the new tokens are already written. Query i of span
    n sees positions 0..length[n] + i, `length` being the count before the new tokens. Returns (o
    [T, H, value_dim] fp32, max_logit [H] over valid tokens). No gradient. Source: Kimi K3 report
    §2.1.2.
    """
    heads, dtype = q_THR.shape[1], wide(q_THR.dtype)
    o_THC = torch.zeros(q_THR.shape[0], heads, value_dim, dtype=dtype, device=q_THR.device)
    max_H = torch.full((heads,), -torch.inf, dtype=dtype, device=q_THR.device)
    lengths = length_N.tolist()
    with torch.no_grad(), without_autocast(q_THR):
        for new, members in _decode_batches(spans, lengths):
            starts = [spans.offsets[n] for n in members]
            q_NLHR = torch.stack([q_THR[start : start + new] for start in starts])
            old_N = torch.tensor([lengths[n] for n in members], device=q_THR.device)
            rows_NKR = _read_rows(
                pages_PBR, table_NM, members, max(lengths[n] for n in members) + new
            )
            o_NLHC, top_H = _latent(q_NLHR, rows_NKR, old_N, scale, value_dim)
            max_H = torch.maximum(max_H, top_H)
            for start, o_LHC in zip(starts, o_NLHC, strict=True):
                o_THC[start : start + new] = o_LHC
    return o_THC, max_H


def _decode_batches(spans: Spans, lengths: list[int]) -> Iterator[tuple[int, list[int]]]:
    """(new tokens, spans) with equal query counts and key counts within a factor of two.

    Padding every request to the longest would cost a short one the memory of a long one.
    """
    last = spans.num_spans - bool(spans.padding)
    groups: dict[tuple[int, int], list[int]] = {}
    for n, new in enumerate(spans.lengths[:last]):
        if new:
            groups.setdefault((new, (lengths[n] + new).bit_length()), []).append(n)
    for (new, _), members in groups.items():
        yield new, members


def _read_rows(pages_PBR: Tensor, table_NM: Tensor, members: list[int], count: int) -> Tensor:
    """The first `count` rows of each request [n, count, R]; slots past a request's end hold
    anything."""
    size = pages_PBR.shape[1]
    needed = -(-count // size)
    if needed > table_NM.shape[1]:
        raise IndexError(
            f"{count} positions need {needed} pages, the table has {table_NM.shape[1]}"
        )
    page_NM = table_NM[members, :needed].to(torch.int64).clamp(min=0)
    return pages_PBR[page_NM].flatten(1, 2)[:, :count]


def _latent(
    q_NLHR: Tensor, rows_NKR: Tensor, old_N: Tensor, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    """(o [N, L, H, value_dim], max logit [H]) over blocks of queries."""
    count, new, heads, _ = q_NLHR.shape
    keys = rows_NKR.shape[1]
    dtype = wide(q_NLHR.dtype)
    rows_NKR = rows_NKR.to(q_NLHR.dtype if q_NLHR.is_cuda else dtype)
    key_K = torch.arange(keys, device=q_NLHR.device)
    # a stale slot may hold NaN, and 0 * NaN would reach the sum
    live_NK1 = (key_K < (old_N + new).unsqueeze(1)).unsqueeze(-1)
    rows_NKR = torch.where(live_NK1, rows_NKR, 0)
    o_NLHC = torch.empty(count, new, heads, value_dim, dtype=dtype, device=q_NLHR.device)
    max_H = torch.full((heads,), -torch.inf, dtype=dtype, device=q_NLHR.device)
    step = max(1, BLOCK_ELEMENTS // (count * heads * keys))
    for start in range(0, new, step):
        q = q_NLHR[:, start : start + step]
        size = q.shape[1]
        limit_NL = old_N.unsqueeze(1) + torch.arange(start, start + size, device=q.device)
        hidden_NL1K = key_K > limit_NL[:, :, None, None]
        s = product(q.flatten(1, 2).to(rows_NKR.dtype), rows_NKR.mT).mul_(scale)
        s = s.view(count, size, heads, keys).masked_fill_(hidden_NL1K, -torch.inf)
        max_H = torch.maximum(max_H, s.amax((0, 1, 3)))
        p = torch.softmax(s, -1).view(count, size * heads, keys)
        o = product(p.to(rows_NKR.dtype), rows_NKR[..., :value_dim])
        o_NLHC[:, start : start + size] = o.view(count, size, heads, value_dim)
    return o_NLHC, max_H
