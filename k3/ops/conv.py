"""Short causal depthwise convolution with SiLU over packed spans, carrying its window in and out.

    c_t[i] = Σ_j w[i, j] · u_{t-W+1+j}[i],   y = SiLU(c),   with zero history at the start of a span

Shifted multiply-adds on the whole token axis, as if it were one document; the first W-1 tokens of
every span, its edge, are then put right from the span's window.

Legend: T tokens, C channels, W taps, N spans, E edge tokens, R = N·(W-1) window rows.
Source: Kimi K3 report §2.1.1; released weights [C, 1, W].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from k3.ops.product import wide
from k3.ops.spans import Spans


def short_conv(
    u_TC: Tensor, weight_CW: Tensor, spans: Spans, window_NWC: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """u [T, C], weight [C, W], last W-1 inputs per span [N, W-1, C] (zeros when None) -> (y [T, C],
    new window).

    Computed in fp32 (fp64 for fp64 inputs), returned in u's dtype. Differentiable in all three
    tensors.
    ValueError when shapes disagree.
    """
    channels, taps = weight_CW.shape
    if u_TC.shape != (spans.num_tokens, channels):
        raise ValueError(
            f"conv input {tuple(u_TC.shape)} for {spans.num_tokens} tokens of {channels} channels"
        )
    expected = (spans.num_spans, taps - 1, channels)
    if window_NWC is not None and window_NWC.shape != expected:
        raise ValueError(f"conv window {tuple(window_NWC.shape)}, expected {expected}")
    return _ShortConv.apply(u_TC, weight_CW, window_NWC, _edges(spans.lengths, taps, spans.device))


@dataclass(frozen=True, eq=False)
class _Edges:
    """Where spans begin and end. Sources count the R window rows first, then the edge tokens."""

    token_E: Tensor
    source_EW: Tensor
    """The source of each tap of an edge token."""
    only: bool
    """No token lies outside the edges."""
    last: tuple[Tensor, Tensor]
    """Rows of the new window that are tokens, and these tokens."""
    shifted: tuple[Tensor, Tensor]
    """Rows of the new window that were in the old one, and their places there."""


@lru_cache(maxsize=16)
def _edges(lengths: tuple[int, ...], taps: int, device: torch.device) -> _Edges:
    history, start, seen = taps - 1, 0, len(lengths) * (taps - 1)
    token: list[int] = []
    source: list[list[int]] = []
    last: list[tuple[int, int]] = []
    shifted: list[tuple[int, int]] = []
    for n, length in enumerate(lengths):
        edge = min(length, history)
        before = range(n * history, (n + 1) * history)
        rows = [*before, *range(seen, seen + edge)]
        token += range(start, start + edge)
        source += [rows[i : i + taps] for i in range(edge)]
        for row, place in zip(before, range(length - history, length), strict=True):
            if place >= 0:
                last.append((row, start + place))
            else:
                shifted.append((row, before[place]))
        start, seen = start + length, seen + edge

    def index(rows: Any) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64).to(device)

    def pair(rows: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        return index([a for a, _ in rows]), index([b for _, b in rows])

    source_EW = index(source).view(-1, taps)
    return _Edges(index(token), source_EW, len(token) == start, pair(last), pair(shifted))


class _ShortConv(torch.autograd.Function):
    """Keeps only its inputs for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, u_TC: Tensor, weight_CW: Tensor, window_NWC: Tensor | None, edges: _Edges
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(u_TC, weight_CW, window_NWC)
        ctx.edges = edges
        ctx.set_materialize_grads(False)
        u, w_WC, window_RC = _widened(u_TC, weight_CW, window_NWC, edges)
        c_TC = _convolve(u, w_WC, _taps(u, window_RC, edges), edges)
        new_RC = torch.empty_like(window_RC)
        for target, kept, rows in ((edges.last, u, u_TC), (edges.shifted, window_RC, window_RC)):
            if len(rows):
                new_RC.index_copy_(0, target[0], kept.index_select(0, target[1]))
        y_TC = F.silu(c_TC, inplace=True).to(u_TC.dtype)
        return y_TC, new_RC.view(-1, len(w_WC) - 1, u.shape[1]).to(u_TC.dtype)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy_TC: Tensor | None, dlast_NWC: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        u_TC, weight_CW, window_NWC = ctx.saved_tensors
        edges: _Edges = ctx.edges
        u, w_WC, window_RC = _widened(u_TC, weight_CW, window_NWC, edges)
        if dy_TC is None:
            du, dw_WC = torch.zeros_like(u), torch.zeros_like(w_WC)
            dwindow_RC = torch.zeros_like(window_RC)
        else:
            du, dw_WC, dwindow_RC = _backward(u, w_WC, window_RC, dy_TC.to(u.dtype), edges)
        if dlast_NWC is not None:
            dlast_RC = dlast_NWC.to(u.dtype).flatten(0, 1)
            for (rows, kept), grad in ((edges.last, du), (edges.shifted, dwindow_RC)):
                grad.index_add_(0, kept, dlast_RC.index_select(0, rows))
        dwindow = None
        if window_NWC is not None:
            dwindow = dwindow_RC.view(window_NWC.shape).to(window_NWC.dtype)
        return du.to(u_TC.dtype), dw_WC.t().to(weight_CW.dtype), dwindow, None


def _widened(
    u_TC: Tensor, weight_CW: Tensor, window_NWC: Tensor | None, edges: _Edges
) -> tuple[Tensor, Tensor, Tensor]:
    """u [T, C], w [W, C] and window [R, C] in the wide type."""
    dtype = wide(torch.promote_types(u_TC.dtype, weight_CW.dtype))
    rows = len(edges.last[0]) + len(edges.shifted[0])
    if window_NWC is None:
        window_RC = u_TC.new_zeros(rows, u_TC.shape[1], dtype=dtype)
    else:
        window_RC = window_NWC.to(dtype).flatten(0, 1)
    return u_TC.to(dtype), weight_CW.t().to(dtype).contiguous(), window_RC


def _taps(u_TC: Tensor, window_RC: Tensor, edges: _Edges) -> Tensor:
    """[E, W, C] what the taps of edge tokens read."""
    source = torch.cat([window_RC, u_TC.index_select(0, edges.token_E)])
    read = source.index_select(0, edges.source_EW.flatten())
    return read.view(*edges.source_EW.shape, u_TC.shape[1])


def _convolve(u_TC: Tensor, w_WC: Tensor, taps_EWC: Tensor, edges: _Edges) -> Tensor:
    edge_EC = (taps_EWC * w_WC).sum(1)
    if edges.only:
        return edge_EC
    c_TC = u_TC * w_WC[-1]
    for shift in range(1, len(w_WC)):
        c_TC[shift:].addcmul_(u_TC[:-shift], w_WC[-1 - shift])
    return c_TC.index_copy_(0, edges.token_E, edge_EC)


def _backward(
    u_TC: Tensor, w_WC: Tensor, window_RC: Tensor, dy_TC: Tensor, edges: _Edges
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of u, w and the window by that of y."""
    taps_EWC = _taps(u_TC, window_RC, edges)
    dc_TC = torch.ops.aten.silu_backward(dy_TC, _convolve(u_TC, w_WC, taps_EWC, edges))
    edge_E1C = dc_TC.index_select(0, edges.token_E)[:, None]
    dtaps_EWC, dw_WC = edge_E1C * w_WC, (edge_E1C * taps_EWC).sum(0)
    dsource = torch.zeros(
        len(window_RC) + len(edges.token_E), u_TC.shape[1], dtype=u_TC.dtype, device=u_TC.device
    )
    for tap in range(len(w_WC)):  # no source twice in one tap, so the order of sums is fixed
        dsource.index_add_(0, edges.source_EW[:, tap], dtaps_EWC[:, tap])
    dwindow_RC, dedge_EC = dsource.split([len(window_RC), len(edges.token_E)])
    if edges.only:
        return dedge_EC, dw_WC, dwindow_RC
    dc_TC.index_fill_(0, edges.token_E, 0.0)
    du_TC = dc_TC * w_WC[-1]
    dw_WC[-1] += torch.linalg.vecdot(dc_TC, u_TC, dim=0)
    for shift in range(1, len(w_WC)):
        du_TC[:-shift].addcmul_(dc_TC[shift:], w_WC[-1 - shift])
        dw_WC[-1 - shift] += torch.linalg.vecdot(dc_TC[shift:], u_TC[:-shift], dim=0)
    return du_TC.index_add_(0, edges.token_E, dedge_EC), dw_WC, dwindow_RC
