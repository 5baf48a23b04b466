"""Rotary positions, for the baselines only: K3 itself has none."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x_THd: Tensor, positions_T: Tensor, theta: float) -> Tensor:
    """Rotates pairs (i, i + d/2) of the last axis by position · theta^(-2i/d).

    Angles in fp32; returns x's dtype.
    """
    half = x_THd.shape[-1] // 2
    powers = torch.arange(half, device=x_THd.device, dtype=torch.float32) / half
    angles = (positions_T.to(torch.float32)[:, None] * theta**-powers)[:, None, :]
    cos, sin = angles.cos().to(x_THd.dtype), angles.sin().to(x_THd.dtype)
    a, b = x_THd.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
