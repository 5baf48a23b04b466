"""The dense gated feed-forward layer: `down(act(gate x, up x))` with SiTU-GLU or SwiGLU (report
§2.3.2).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from k3.model.config import K3Config
from k3.model.layers import Linear
from k3.ops.situ import situ_glu, swiglu

Activation = Callable[[Tensor, Tensor], Tensor]


def activation(config: K3Config) -> Activation:
    """The gated activation `f(gate, up)` that the config names."""
    if config.activation == "situ":
        return partial(situ_glu, beta=config.situ_beta, linear_beta=config.situ_linear_beta)
    return swiglu


class GLU(nn.Module):
    """x [T, D] -> [T, D] through a hidden width."""

    def __init__(self, config: K3Config, width: int, **factory: Any):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, width, **factory)
        self.up_proj = Linear(config.hidden_size, width, **factory)
        self.down_proj = Linear(width, config.hidden_size, **factory)
        self.activation = activation(config)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x_TD), self.up_proj(x_TD)))
