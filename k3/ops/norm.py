"""RMSNorm as the released model computes it, and the gated form behind a KDA head.

Legend: x [..., D] activations, weight [D].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3.ops.product import wide, without_autocast


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last axis, times `weight`; statistics in fp32, `eps` inside the root of
    the mean.

    x [..., D], weight [D] -> [..., D] in x's dtype. The normalised value is rounded to x's dtype
    before the weight multiplies it (no "1 + w"), as in the released code. Source: Kimi K3 report
    §2; modeling_kimi_linear.
    """
    _check(x, weight)
    return _RMSNorm.apply(x, weight, eps)


def gated_rms_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm(o) * weight * sigmoid(gate), all in fp32, back to o's dtype.

    o [..., D], gate [..., D] (logits), weight [D] -> [..., D]. Source: Kimi K3 report §2.1, eq. 6.
    """
    _check(o, weight)
    if gate.shape != o.shape:
        raise ValueError(f"gate {tuple(gate.shape)} must have the shape of o {tuple(o.shape)}")
    return _GatedRMSNorm.apply(o, gate, weight, eps)


def _check(x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}")


def _normalise(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x / rms in the wide type, 1 / rms [..., 1])."""
    x = x.to(wide(x.dtype))
    # vector_norm reads x once and writes no square, which halves the memory traffic of
    # pow(2).mean()
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    rstd = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return x * rstd, rstd


def _norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients in x (wide) and weight of y = x * rstd * weight, rows flattened to [T, D].

    Both sums over a row or a column are matrix-vector products of the one array dy * x, so neither
    the normalised rows nor their products are written again.
    """
    weight, column = weight.to(rstd.dtype), rstd.squeeze(-1)
    with without_autocast(x):
        dyx = dy * x
        dweight = torch.mv(dyx.t(), column)
        along_x = torch.mv(dyx, weight).mul_(column.pow(3)).div_(-x.shape[-1])
    dx = (dy * weight).mul_(rstd)
    return dx.addcmul_(x, along_x.unsqueeze(-1)), dweight


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        n, rstd = _normalise(x, eps)
        ctx.save_for_backward(x, weight, rstd)
        if x.dtype == n.dtype == weight.dtype:
            return n.mul_(weight)
        return (n.to(x.dtype) * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        dy, rows, rstd = _rows(grads[0], x, rstd)
        dx, dweight = _norm_backward(dy, rows, weight, rstd)
        return dx.view(x.shape).to(x.dtype), dweight.to(weight.dtype), None


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        n, rstd = _normalise(o, eps)
        ctx.save_for_backward(o, gate, weight, rstd)
        return n.mul_(torch.sigmoid(gate.to(n.dtype))).mul_(weight).to(o.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        o, gate, weight, rstd = ctx.saved_tensors
        dy, rows, rstd = _rows(grads[0], o, rstd)
        open_ = torch.sigmoid(gate.to(rstd.dtype)).view_as(rows)
        through = dy * open_
        do, dweight = _norm_backward(through, rows, weight, rstd)
        # y (1 - open) dy, as sigmoid' = open (1 - open)
        dgate = through.mul_(rows).mul_(rstd).mul_(weight)
        dgate = torch.addcmul(dgate, dgate, open_, value=-1)
        return (
            do.view(o.shape).to(o.dtype),
            dgate.view(o.shape).to(gate.dtype),
            dweight.to(weight.dtype),
            None,
        )


def _rows(dy: Tensor, x: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All three in the wide type as [T, D], [T, D] and [T, 1]."""
    width = x.shape[-1]
    dtype = rstd.dtype
    return dy.to(dtype).reshape(-1, width), x.to(dtype).reshape(-1, width), rstd.view(-1, 1)
