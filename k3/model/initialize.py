"""How each weight starts. Ours, stated here; where the released code differs (uninitialised dt_bias
and router bias, A_log
drawn from log U(1, 16), random pseudo-queries) the report and the papers it cites are followed.

| weight | start |
|---|---|
| matrices, experts, router | N(0, initializer_range²), or N(0, 1/fan-in) when that is None |
| embedding | N(0, initializer_range²), or N(0, 1) when None |
| head | N(0, initializer_range²), or N(0, 1/(4·fan-in)) when None |
| short convolutions | U(-1/sqrt(W), 1/sqrt(W)) |
| A_log | 0 |
| dt_bias | inverse softplus of dt, dt log-uniform in [1e-3, 0.1] and at least 1e-4 |
| pseudo-queries | 0; N(0, 1/D) when the config freezes them at random |
| norm weights | 1 |
| selection bias | 0 |
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from k3.model.config import K3Config
from k3.ops.facts import ParamFacts


@torch.no_grad()
def initialize(name: str, parameter: Tensor, facts: ParamFacts, config: K3Config) -> None:
    """Fills one parameter in place, drawing from torch's global generator in fp32."""
    if parameter.is_meta:
        return
    parameter.copy_(_start(name, parameter, facts, config).to(parameter.dtype))


def _start(name: str, parameter: Tensor, facts: ParamFacts, config: K3Config) -> Tensor:
    shape, device = parameter.shape, parameter.device
    if facts.role == "norm":
        return torch.ones(shape, device=device)
    if facts.role == "query":
        if config.attnres.query == "random":
            return torch.randn(shape, device=device) * shape[-1] ** -0.5
        return torch.zeros(shape, device=device)
    if facts.role == "vector":
        return (
            _dt_bias(shape, device)
            if name.endswith("dt_bias")
            else torch.zeros(shape, device=device)
        )
    if facts.role == "conv":
        return (torch.rand(shape, device=device) * 2 - 1) * shape[-1] ** -0.5
    return torch.randn(shape, device=device) * _spread(facts.role, shape[-1], config)


def _spread(role: str, fan_in: int, config: K3Config) -> float:
    if config.initializer_range is not None:
        return config.initializer_range
    return {"embedding": 1.0, "head": 0.5 * fan_in**-0.5}.get(role, fan_in**-0.5)


def _dt_bias(shape: torch.Size, device: torch.device) -> Tensor:
    low, high = math.log(1e-3), math.log(0.1)
    dt = torch.exp(torch.rand(shape, device=device) * (high - low) + low).clamp_min(1e-4)
    return dt + torch.log(-torch.expm1(-dt))
