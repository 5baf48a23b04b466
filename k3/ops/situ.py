"""The gated activations: SiTU-GLU of K3, and SwiGLU for the ablation.

Legend: g [..., m] gate (w1), u [..., m] up (w3).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from k3.ops.product import wide


def situ_glu(g: Tensor, u: Tensor, beta: float = 4.0, linear_beta: float = 25.0) -> Tensor:
    """[beta tanh(g / beta) sigmoid(g)] * [linear_beta tanh(u / linear_beta)] in fp32, in g's dtype.

    g, u [..., m] -> [..., m], bounded by beta * linear_beta. The sigmoid takes the raw g: only the
    linear factor is capped. Source: Kimi K3 report §2.3.2, eq. 12.
    """
    _check(g, u)
    return _SiTU.apply(g, u, beta, linear_beta)


def swiglu(g: Tensor, u: Tensor) -> Tensor:
    """g sigmoid(g) * u in fp32, in g's dtype: the activation K3 replaced."""
    _check(g, u)
    dtype = wide(g.dtype)
    return (F.silu(g.to(dtype)) * u.to(dtype)).to(g.dtype)


def _check(g: Tensor, u: Tensor) -> None:
    if g.shape != u.shape:
        raise ValueError(f"gate {tuple(g.shape)} and up {tuple(u.shape)} must have one shape")


def _factors(g: Tensor, u: Tensor, beta: float, linear_beta: float) -> tuple[Tensor, ...]:
    """(sigmoid(g), tanh(g / beta), tanh(u / linear_beta)) in the wide type."""
    dtype = wide(g.dtype)
    g, u = g.to(dtype), u.to(dtype)
    return torch.sigmoid(g), (g / beta).tanh_(), (u / linear_beta).tanh_()


class _SiTU(torch.autograd.Function):
    """Keeps the three factors on a CPU, where a tanh costs twenty multiplications, and g and u on a
    GPU, where memory costs more than computing them again."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, u: Tensor, beta: float, linear_beta: float) -> Tensor:
        s, t, w = _factors(g, u, beta, linear_beta)
        ctx.save_for_backward(*((g, u) if g.is_cuda else (s, t, w)))
        ctx.betas, ctx.dtypes = (beta, linear_beta), (g.dtype, u.dtype)
        return (s * t).mul_(w).mul_(beta * linear_beta).to(g.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        beta, linear_beta = ctx.betas
        saved = ctx.saved_tensors
        if len(saved) == 2:
            saved = _factors(saved[0], saved[1], beta, linear_beta)
        s, t, w = saved
        dy = grads[0].to(s.dtype)
        gate = (s * t).mul_(beta)
        # d up = 1 - tanh^2;  d gate = s (1 - t^2) + gate (1 - s)
        du = torch.addcmul(gate, gate * w, w, value=-1).mul_(dy)
        dg = torch.addcmul(s, s * t, t, value=-1).add_(gate).addcmul_(gate, s, value=-1)
        dg.mul_(w).mul_(dy).mul_(linear_beta)
        return dg.to(ctx.dtypes[0]), du.to(ctx.dtypes[1]), None, None
