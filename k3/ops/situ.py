"""The gated activations: SiTU-GLU of K3, and SwiGLU for the ablation.

Legend: g [..., m] gate (w1), u [..., m] up (w3).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3.ops.product import wide


def situ_glu(g: Tensor, u: Tensor, beta: float = 4.0, linear_beta: float = 25.0) -> Tensor:
    """[beta tanh(g / beta) sigmoid(g)] * [linear_beta tanh(u / linear_beta)], fp32 inside, back to
    g's dtype.

    g, u [..., m] -> [..., m], bounded by beta * linear_beta. The sigmoid takes the raw g: only the
    linear factor is capped. Saves g and u alone and recomputes in the backward. Source: Kimi K3
    report §2.3.2, eq. 12.
    """
    _check(g, u)
    return _SiTU.apply(g, u, beta, linear_beta)


def swiglu(g: Tensor, u: Tensor) -> Tensor:
    """g sigmoid(g) * u, fp32 inside, back to g's dtype: the activation K3 replaced."""
    _check(g, u)
    return _SwiGLU.apply(g, u)


def _check(g: Tensor, u: Tensor) -> None:
    if g.shape != u.shape:
        raise ValueError(f"gate {tuple(g.shape)} and up {tuple(u.shape)} must have one shape")


class _SiTU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, u: Tensor, beta: float, linear_beta: float) -> Tensor:
        ctx.save_for_backward(g, u)
        ctx.betas = beta, linear_beta
        dtype = wide(g.dtype)
        g32, u32 = g.to(dtype), u.to(dtype)
        y = (g32 / beta).tanh_().mul_(torch.sigmoid(g32))
        y.mul_((u32 / linear_beta).tanh_()).mul_(beta * linear_beta)
        return y.to(g.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        g, u = ctx.saved_tensors
        beta, linear_beta = ctx.betas
        dtype = wide(g.dtype)
        dy = grads[0].to(dtype)
        s = torch.sigmoid(g.to(dtype))
        t = (g.to(dtype) / beta).tanh_()
        w = (u.to(dtype) / linear_beta).tanh_()
        gate = (s * t).mul_(beta)
        du = (w * w).neg_().add_(1).mul_(gate).mul_(dy)
        # d gate / dg = s (1 - t^2) + gate (1 - s)
        slope = (t * t).neg_().add_(1).mul_(s).add_(gate).addcmul_(gate, s, value=-1)
        dg = slope.mul_(w).mul_(dy).mul_(linear_beta)
        return dg.to(g.dtype), du.to(u.dtype), None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, u: Tensor) -> Tensor:
        ctx.save_for_backward(g, u)
        dtype = wide(g.dtype)
        g32 = g.to(dtype)
        return torch.sigmoid(g32).mul_(g32).mul_(u.to(dtype)).to(g.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        g, u = ctx.saved_tensors
        dtype = wide(g.dtype)
        g32, u32, dy = g.to(dtype), u.to(dtype), grads[0].to(dtype)
        s = torch.sigmoid(g32)
        gate = s * g32
        du = gate * dy
        # d (g s) / dg = s + g s (1 - s)
        dg = torch.addcmul(s, gate, s, value=-1).add_(gate).mul_(u32).mul_(dy)
        return dg.to(g.dtype), du.to(u.dtype)
