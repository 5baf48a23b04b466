"""RMSNorm as the released model computes it, and the gated form behind a KDA head.

Legend: x [..., D] activations, weight [D].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3.ops.product import wide


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


def _norm_backward(dn: Tensor, n: Tensor, rstd: Tensor) -> Tensor:
    """Gradient of n = x * rstd in x; overwrites n."""
    dot = (dn * n).mean(-1, keepdim=True)
    return n.mul_(dot).neg_().add_(dn).mul_(rstd)


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
        dy = grads[0].to(rstd.dtype)
        n = x * rstd
        dw = torch.mul(dy, n).reshape(-1, n.shape[-1]).sum(0).to(weight.dtype)
        dx = _norm_backward(dy * weight, n, rstd)
        return dx.to(x.dtype), dw, None


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        n, rstd = _normalise(o, eps)
        ctx.save_for_backward(o, gate, weight, rstd)
        open_ = torch.sigmoid(gate.to(n.dtype))
        return n.mul_(open_).mul_(weight).to(o.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        o, gate, weight, rstd = ctx.saved_tensors
        dy = grads[0].to(rstd.dtype)
        n = o * rstd
        open_ = torch.sigmoid(gate.to(rstd.dtype))
        dy_open = dy * open_
        dn = dy_open * weight
        dw = torch.mul(dy_open, n).reshape(-1, n.shape[-1]).sum(0).to(weight.dtype)
        dgate = (dn * n).addcmul_(dn * n, open_, value=-1)
        do = _norm_backward(dn, n, rstd)
        return do.to(o.dtype), dgate.to(gate.dtype), dw, None
