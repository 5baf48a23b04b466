"""Short causal depthwise convolution with SiLU over packed spans, carrying its window in and out.

    c_t[i] = Σ_j w[i, j] · u_{t-W+1+j}[i],   y = SiLU(c),   with zero history at the start of a span

Legend: T tokens, C channels, W taps, N spans, X = T + N·(W-1) rows of the extended axis, on which
each
span is preceded by its window.
Source: Kimi K3 report §2.1.1; released weights [C, 1, W].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
    rows_T, last_NW = _extended_rows(spans, taps - 1)
    return _ShortConv.apply(u_TC, weight_CW, window_NWC, rows_T, last_NW)


def _extended_rows(spans: Spans, history: int) -> tuple[Tensor, Tensor]:
    """Where each token lies on the extended axis [T], and where each span's last `history` rows
    lie [N, W-1].
    """
    index = torch.arange(spans.num_spans, device=spans.device)
    segments_T = spans.segments()
    tokens_T = torch.arange(spans.num_tokens, device=spans.device)
    rows_T = tokens_T + (segments_T + 1) * history
    ends_N = spans.cu_seqlens[1:].long() + (index + 1) * history
    last_NW = ends_N[:, None] + torch.arange(-history, 0, device=spans.device)
    return rows_T, last_NW


class _ShortConv(torch.autograd.Function):
    """Shifted multiply-adds on the extended axis; only the input is kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        u_TC: Tensor,
        weight_CW: Tensor,
        window: Tensor | None,
        rows_T: Tensor,
        last_NW: Tensor,
    ) -> tuple[Tensor, Tensor]:
        x_XC = _extend(u_TC, weight_CW, window, rows_T, last_NW)
        ctx.save_for_backward(x_XC, weight_CW, rows_T, last_NW)
        ctx.u_dtype, ctx.window_dtype = u_TC.dtype, None if window is None else window.dtype
        c_TC = _convolve(x_XC, weight_CW.to(x_XC.dtype))[rows_T - (weight_CW.shape[1] - 1)]
        y_TC = torch.nn.functional.silu(c_TC, inplace=True).to(u_TC.dtype)
        return y_TC, x_XC[last_NW].to(u_TC.dtype)

    @staticmethod
    def backward(ctx: Any, dy_TC: Tensor, dlast_NWC: Tensor) -> tuple[Tensor | None, ...]:
        x_XC, weight_CW, rows_T, last_NW = ctx.saved_tensors
        taps = weight_CW.shape[1]
        w = weight_CW.to(x_XC.dtype)
        c_XC = _convolve(x_XC, w)
        sigma = c_XC.sigmoid()
        slope_XC = sigma.addcmul(c_XC * sigma, 1 - sigma)
        dc_XC = torch.zeros_like(c_XC)
        dc_XC[rows_T - (taps - 1)] = dy_TC.to(x_XC.dtype)
        dc_XC *= slope_XC
        dx_XC = torch.zeros_like(x_XC)
        dw_WC = torch.empty_like(w.T)
        size = c_XC.shape[0]
        for j in range(taps):
            dx_XC[j : j + size].addcmul_(dc_XC, w[:, j])
            torch.sum(dc_XC * x_XC[j : j + size], dim=0, out=dw_WC[j])
        dx_XC.index_add_(0, last_NW.flatten(), dlast_NWC.to(x_XC.dtype).flatten(0, 1))
        dwindow = None
        if ctx.window_dtype is not None:
            first_NW = _window_rows(rows_T, last_NW)
            dwindow = dx_XC[first_NW].to(ctx.window_dtype)
        return dx_XC[rows_T].to(ctx.u_dtype), dw_WC.T.to(weight_CW.dtype), dwindow, None, None


def _extend(
    u_TC: Tensor, weight_CW: Tensor, window: Tensor | None, rows_T: Tensor, last_NW: Tensor
) -> Tensor:
    rows = rows_T.shape[0] + last_NW.numel()
    dtype = wide(torch.promote_types(u_TC.dtype, weight_CW.dtype))
    x_XC = torch.zeros(rows, u_TC.shape[1], dtype=dtype, device=u_TC.device)
    x_XC[rows_T] = u_TC.to(dtype)
    if window is not None:
        x_XC[_window_rows(rows_T, last_NW)] = window.to(dtype)
    return x_XC


def _window_rows(rows_T: Tensor, last_NW: Tensor) -> Tensor:
    """Rows [N, W-1] of the extended axis that hold the incoming windows: each span's first ones."""
    spans, history = last_NW.shape
    ends_N = last_NW[:, -1] + 1
    starts_N = torch.cat([ends_N.new_zeros(1), ends_N[:-1]])
    return starts_N[:, None] + torch.arange(history, device=rows_T.device)


def _convolve(x_XC: Tensor, w_CW: Tensor) -> Tensor:
    """[X, C] -> [X-W+1, C]; row p is the convolution that ends at extended row p+W-1."""
    taps = w_CW.shape[1]
    size = max(0, x_XC.shape[0] - taps + 1)
    c_XC = x_XC[:size] * w_CW[:, 0]
    for j in range(1, taps):
        c_XC.addcmul_(x_XC[j : j + size], w_CW[:, j])
    return c_XC
