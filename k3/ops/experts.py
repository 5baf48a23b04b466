"""Routed experts without dropping: sort by expert, grouped products, weighted sum.

Legend: T tokens, k experts per token, N = T * k rows sorted by expert, E experts, l latent width,
m expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from k3.ops.product import wide, without_autocast

Glu = Callable[[Tensor, Tensor], Tensor]
Quant = Callable[[Tensor, str], Tensor]
"""(tensor, "weight" or "activation") -> what the product sees; straight-through or not is its
choice."""
Compute = Callable[[Tensor, Tensor], Tensor]
"""(rows_Nl sorted by expert, counts_E int64) -> outputs_Nl, one per row, not yet weighted."""
Dispatch = Callable[[Tensor, Tensor, Tensor, Compute], Tensor]
"""(x_Tl, indices_Tk, weights_Tk, compute) -> u_Tl. Replaces the local permutation: it may send rows
to other ranks, calls `compute` on what it received (sorted by local expert) and combines in
fp32."""


def experts(
    x_Tl: Tensor,
    indices_Tk: Tensor,
    weights_Tk: Tensor,
    w1_Eml: Tensor,
    w3_Eml: Tensor,
    w2_Elm: Tensor,
    glu: Glu,
    *,
    quant: Quant | None = None,
    dispatch: Dispatch | None = None,
) -> Tensor:
    """u = sum_j weight_j * w2_j glu(w1_j x, w3_j x) over a token's experts j; [T, l] in x's dtype.

    x_Tl [T, l], indices_Tk int64 and weights_Tk [T, k], w1 and w3 [E, m, l], w2 [E, l, m]. The
    expert weights are cast to x's dtype; the sum runs in fp32. No token is dropped; 0 tokens and
    experts without tokens are fine (their gradients are zeros). Raises ValueError on shapes that do
    not fit. Source: Kimi K3 report §2.3, eq. 11.
    """
    num_experts, width, latent = w1_Eml.shape
    if x_Tl.shape[1:] != (latent,) or w3_Eml.shape != w1_Eml.shape:
        raise ValueError(
            f"x {tuple(x_Tl.shape)}, w1 {tuple(w1_Eml.shape)}, w3 {tuple(w3_Eml.shape)}"
        )
    if w2_Elm.shape != (num_experts, latent, width):
        raise ValueError(f"w2 {tuple(w2_Elm.shape)} must be {(num_experts, latent, width)}")
    if indices_Tk.shape != weights_Tk.shape or indices_Tk.shape[:1] != x_Tl.shape[:1]:
        raise ValueError(
            f"indices {tuple(indices_Tk.shape)} and weights {tuple(weights_Tk.shape)} do not fit "
            f"x {tuple(x_Tl.shape)}"
        )
    compute = partial(_compute, w1_Eml=w1_Eml, w3_Eml=w3_Eml, w2_Elm=w2_Elm, glu=glu, quant=quant)
    if dispatch is not None:
        return dispatch(x_Tl, indices_Tk, weights_Tk, compute)
    order_N, place_Tk, counts_E = sort_by_expert(indices_Tk, num_experts)
    rows_Nl = gather(x_Tl, order_N, place_Tk)
    return combine(compute(rows_Nl, counts_E), weights_Tk, order_N, place_Tk, x_Tl.dtype)


def _compute(
    rows_Nl: Tensor,
    counts_E: Tensor,
    *,
    w1_Eml: Tensor,
    w3_Eml: Tensor,
    w2_Elm: Tensor,
    glu: Glu,
    quant: Quant | None,
) -> Tensor:
    w1, w3, w2 = (w if quant is None else quant(w, "weight") for w in (w1_Eml, w3_Eml, w2_Elm))
    if quant is not None:
        rows_Nl = quant(rows_Nl, "activation")
    g_Nm, u_Nm = grouped_linear(rows_Nl, counts_E, w1, w3)
    h_Nm = glu(g_Nm, u_Nm)
    if quant is not None:
        h_Nm = quant(h_Nm, "activation")
    return grouped_linear(h_Nm, counts_E, w2)[0]


def sort_by_expert(indices_Tk: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order_N, place_Tk, counts_E): row i holds choice order[i] = t * k + j, at place[t, j] = i.

    Stable, so an expert sees its tokens in order.
    """
    flat_N = indices_Tk.reshape(-1)
    if flat_N.device.type == "cpu":
        # numpy sorts 16-bit keys by radix, several times faster than torch's stable sort
        order_N = torch.from_numpy(flat_N.numpy().astype("uint16").argsort(kind="stable"))
        counts_E = torch.bincount(flat_N, minlength=num_experts)
    else:
        order_N = flat_N.argsort(stable=True)
        # bincount would synchronise with the host
        counts_E = flat_N.new_zeros(num_experts).scatter_add_(0, flat_N, torch.ones_like(flat_N))
    place_N = torch.empty_like(order_N)
    place_N[order_N] = torch.arange(order_N.numel(), device=order_N.device)
    return order_N, place_N.view(indices_Tk.shape), counts_E


def gather(x_Tl: Tensor, order_N: Tensor, place_Tk: Tensor) -> Tensor:
    """Rows of x by expert, [N, l]."""
    return _Gather.apply(x_Tl, order_N, place_Tk)


def combine(
    y_Nl: Tensor, weights_Tk: Tensor, order_N: Tensor, place_Tk: Tensor, dtype: torch.dtype
) -> Tensor:
    """sum_j weights[t, j] * y[place[t, j]] in fp32, [T, l] in `dtype`."""
    return _Combine.apply(y_Nl, weights_Tk, order_N, place_Tk, dtype)


def grouped_linear(x_Nl: Tensor, counts_E: Tensor, *weights_Eml: Tensor) -> tuple[Tensor, ...]:
    """For each weight, rows of group e times weight[e].T: [N, m] each, in x's dtype."""
    return _GroupedLinear.apply(x_Nl, counts_E, *(w.to(x_Nl.dtype) for w in weights_Eml))


def _bag(y_Nl: Tensor, place_Tk: Tensor, weights_Tk: Tensor | None) -> Tensor:
    """Gathered and summed in one pass, in y's dtype."""
    if place_Tk.numel() == 0:
        return y_Nl.new_zeros(place_Tk.shape[0], y_Nl.shape[1])
    return F.embedding_bag(place_Tk, y_Nl, per_sample_weights=weights_Tk, mode="sum")


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_Tl: Tensor, order_N: Tensor, place_Tk: Tensor) -> Tensor:
        ctx.save_for_backward(place_Tk)
        token_N = torch.div(order_N, place_Tk.shape[1], rounding_mode="floor")
        return x_Tl.index_select(0, token_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (place_Tk,) = ctx.saved_tensors
        rows = grads[0].to(wide(grads[0].dtype))
        return _bag(rows, place_Tk, None).to(grads[0].dtype), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y_Nl: Tensor,
        weights_Tk: Tensor,
        order_N: Tensor,
        place_Tk: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(y_Nl, weights_Tk, order_N, place_Tk)
        acc = wide(y_Nl.dtype)
        return _bag(y_Nl.to(acc), place_Tk, weights_Tk.to(acc)).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        y_Nl, weights_Tk, order_N, place_Tk = ctx.saved_tensors
        acc = wide(y_Nl.dtype)
        token_N = torch.div(order_N, place_Tk.shape[1], rounding_mode="floor")
        du_Nl = grads[0].to(acc).index_select(0, token_N)
        dot_N = (du_Nl * y_Nl).sum(-1)
        dweights_Tk = dot_N.index_select(0, place_Tk.reshape(-1)).view_as(place_Tk)
        weights_N1 = weights_Tk.reshape(-1, 1).index_select(0, order_N).to(acc)
        dy_Nl = du_Nl.mul_(weights_N1).to(y_Nl.dtype)
        return dy_Nl, dweights_Tk.to(weights_Tk.dtype), None, None, None


class _GroupedLinear(torch.autograd.Function):
    """One autograd node for all weights that share an input, so that dx is summed inside the
    products."""

    @staticmethod
    def forward(ctx: Any, x_Nl: Tensor, counts_E: Tensor, *weights_Eml: Tensor) -> Any:
        ctx.save_for_backward(x_Nl, counts_E, *weights_Eml)
        with without_autocast(x_Nl):
            if _has_grouped_mm(x_Nl, *weights_Eml):
                offsets_E = counts_E.cumsum(0, dtype=torch.int32)
                return tuple(F.grouped_mm(x_Nl, w.mT, offs=offsets_E) for w in weights_Eml)
            counts = counts_E.tolist()
            return tuple(_loop_forward(x_Nl, w, counts) for w in weights_Eml)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x_Nl, counts_E, *weights_Eml = ctx.saved_tensors
        dys = [dy.contiguous() for dy in grads]
        if _has_grouped_mm(x_Nl, *weights_Eml):
            return _grouped_backward(x_Nl, counts_E, weights_Eml, dys)
        counts = counts_E.tolist()
        dx_Nl = torch.empty_like(x_Nl) if ctx.needs_input_grad[0] else None
        if dx_Nl is not None:
            for i, (dy, w) in enumerate(zip(dys, weights_Eml, strict=True)):
                _loop_dx(dx_Nl, dy, w, counts, first=i == 0)
        wanted = ctx.needs_input_grad[2:]
        dws = [
            _loop_dw(x_Nl, dy, w, counts) if want else None
            for dy, w, want in zip(dys, weights_Eml, wanted, strict=True)
        ]
        return dx_Nl, None, *dws


def _has_grouped_mm(x_Nl: Tensor, *weights_Eml: Tensor) -> bool:
    """torch's grouped kernel: CUDA, bf16, rows of whole 16-byte words. Elsewhere a loop over the
    experts, which on a CPU is as fast as one padded batched product and needs no padding; on CUDA
    it costs one host synchronisation and a launch per expert."""
    aligned = all(w.shape[1] % 8 == 0 and w.shape[2] % 8 == 0 for w in weights_Eml)
    return x_Nl.is_cuda and x_Nl.dtype == torch.bfloat16 and aligned and x_Nl.shape[0] > 0


def _grouped_backward(
    x_Nl: Tensor, counts_E: Tensor, weights_Eml: list[Tensor], dys: list[Tensor]
) -> Any:
    offsets_E = counts_E.cumsum(0, dtype=torch.int32)
    dx_Nl = F.grouped_mm(dys[0], weights_Eml[0], offs=offsets_E)
    for dy, w in zip(dys[1:], weights_Eml[1:], strict=True):
        dx_Nl = dx_Nl + F.grouped_mm(dy, w, offs=offsets_E)
    # an expert without rows leaves its block of the kernel's output unwritten
    used_E11 = (counts_E > 0).view(-1, 1, 1)
    dws = [F.grouped_mm(dy.mT, x_Nl, offs=offsets_E) for dy in dys]
    return dx_Nl, None, *(torch.where(used_E11, dw, 0) for dw in dws)


def _loop_forward(x_Nl: Tensor, w_Eml: Tensor, counts: list[int]) -> Tensor:
    y_Nm = x_Nl.new_empty(x_Nl.shape[0], w_Eml.shape[1])
    for x, w, y in zip(x_Nl.split(counts), w_Eml.mT.unbind(), y_Nm.split(counts), strict=True):
        if x.shape[0]:
            torch.mm(x, w, out=y)
    return y_Nm


def _loop_dx(dx_Nl: Tensor, dy_Nm: Tensor, w_Eml: Tensor, counts: list[int], first: bool) -> None:
    for dx, dy, w in zip(dx_Nl.split(counts), dy_Nm.split(counts), w_Eml.unbind(), strict=True):
        if not dy.shape[0]:
            continue
        if first:
            torch.mm(dy, w, out=dx)
        else:
            dx.addmm_(dy, w)


def _loop_dw(x_Nl: Tensor, dy_Nm: Tensor, w_Eml: Tensor, counts: list[int]) -> Tensor:
    dw_Eml = torch.empty_like(w_Eml)
    for x, dy, dw in zip(x_Nl.split(counts), dy_Nm.split(counts), dw_Eml.unbind(), strict=True):
        if x.shape[0]:
            torch.mm(dy.t(), x, out=dw)
        else:
            dw.zero_()
    return dw_Eml
