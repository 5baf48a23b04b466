"""The three plain pieces every block is made of: a linear map, an RMSNorm and a short convolution's
weight.

Weights are kept as created (fp32 masters in training) and cast to the activations' dtype where they
are used, so
the dtype of the residual stream decides what is computed in bf16 and no global autocast state
exists.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3.ops.norm import rms_norm


class Linear(nn.Module):
    """Bias-free `y = x Wᵀ`; weight [out, in]."""

    def __init__(self, in_features: int, out_features: int, **factory: object):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **factory))  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """RMSNorm in fp32, cast back, then times the weight (report's released order)."""

    def __init__(self, width: int, eps: float, **factory: object):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, **factory))  # type: ignore[arg-type]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class ShortConv(nn.Module):
    """The weight [C, 1, W] of one depthwise causal convolution, always fp32."""

    def __init__(self, channels: int, taps: int, device: torch.device | str | None = None):
        super().__init__()
        weight = torch.empty(channels, 1, taps, device=device, dtype=torch.float32)
        self.weight = nn.Parameter(weight)
