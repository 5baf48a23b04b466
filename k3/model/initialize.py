"""How each weight starts. Ours, stated here; where the released code differs (uninitialised dt_bias
and router bias, A_log drawn from log U(1, 16), random pseudo-queries) the report and the papers it
cites are followed.

| weight | start, where the config names no `initializer_range` |
|---|---|
| matrices, experts, router | N(0, 1/fan-in) |
| matrices that write to the residual (o_proj, w2, down_proj, up-projection of the experts) | 0 |
| embedding | N(0, 0.3²) |
| head | N(0, 1/(4·fan-in)) |
| short convolutions | U(-1/sqrt(W), 1/sqrt(W)) |
| A_log | 0 |
| dt_bias | inverse softplus of dt, dt log-uniform in [1e-3, 0.1] and at least 1e-4 |
| pseudo-queries | 0; N(0, 1/D) when the config freezes them at random |
| norm weights | 1 |
| selection bias | 0 |

With an `initializer_range`, matrices, embedding and head are N(0, range²) instead. Numbers are
drawn on the CPU, so a seed means the same weights on every device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from k3.model.config import K3Config
from k3.ops.facts import ParamFacts

WRITERS = ("o_proj.weight", ".w2", ".down_proj.weight", "routed_expert_up_proj.weight")
"""Matrices that write to the residual: zero at the start, so that every branch begins silent."""


@torch.no_grad()
def initialize(name: str, parameter: Tensor, facts: ParamFacts, config: K3Config) -> None:
    """Fills one parameter in place, drawing from torch's global CPU generator in fp32."""
    if not parameter.is_meta:
        parameter.copy_(_start(name, parameter.shape, facts, config))


def _start(name: str, shape: torch.Size, facts: ParamFacts, config: K3Config) -> Tensor:
    if facts.role == "norm":
        return torch.ones(shape)
    if facts.role == "query":
        random = config.attnres.query == "random"
        return torch.randn(shape) * shape[-1] ** -0.5 if random else torch.zeros(shape)
    if facts.role == "vector":
        return _dt_bias(shape) if name.endswith("dt_bias") else torch.zeros(shape)
    if facts.role == "conv":
        return (torch.rand(shape) * 2 - 1) * shape[-1] ** -0.5
    spread = _spread(name, facts.role, shape[-1], config)
    return torch.randn(shape) * spread if spread else torch.zeros(shape)


def _spread(name: str, role: str, fan_in: int, config: K3Config) -> float:
    if config.initializer_range is not None:
        return config.initializer_range
    if name.endswith(WRITERS):
        return 0.0
    return {"embedding": 0.3, "head": 0.5 * fan_in**-0.5}.get(role, fan_in**-0.5)


def _dt_bias(shape: torch.Size) -> Tensor:
    low, high = math.log(1e-3), math.log(0.1)
    dt = torch.exp(torch.rand(shape) * (high - low) + low).clamp_min(1e-4)
    return dt + torch.log(-torch.expm1(-dt))
