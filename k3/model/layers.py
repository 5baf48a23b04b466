"""The plain pieces every block is made of: a linear map, an RMSNorm, a bare weight.

Weights are kept as created (fp32 masters in training) and cast to the activations' dtype where they
are used, so
the dtype of the residual stream decides what is computed in bf16 and no global autocast state
exists.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3.ops.norm import rms_norm


class Linear(nn.Module):
    """Bias-free `y = x Wᵀ`; weight [out, in]."""

    def __init__(self, in_features: int, out_features: int, **factory: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **factory))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """RMSNorm in fp32, cast back, then times the weight (report's released order)."""

    def __init__(self, width: int, eps: float, **factory: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, **factory))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Weight(nn.Module):
    """A bare `weight` of any shape, for what an operation reads itself."""

    def __init__(self, *shape: int, **factory: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, **factory))
