"""Stable LatentMoE: routed experts in a narrow latent, one norm on their sum, shared experts at
full width (report §2.3, eq. 11).

Legend: T tokens, D hidden, l latent width (D in a full-width MoE), m expert width, E experts, k
chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from k3.model.config import K3Config
from k3.model.glu import GLU, activation
from k3.model.layers import Linear, RMSNorm
from k3.model.router import Router
from k3.ops.experts import experts
from k3.ops.spans import Spans


class Experts(nn.Module):
    """Stacked weights of all routed experts: w1 (gate) and w3 (up) [E, m, l], w2 (down) [E, l,
    m].
    """

    def __init__(self, count: int, width: int, latent: int, **factory: Any):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(count, width, latent, **factory))
        self.w2 = nn.Parameter(torch.empty(count, latent, width, **factory))
        self.w3 = nn.Parameter(torch.empty(count, width, latent, **factory))


class LatentMoE(nn.Module):
    dispatch: Callable[..., Tensor] | None = None
    """Replaces the local permutation and products (expert parallelism); set from outside."""
    quant: Callable[[Tensor, str], Tensor] | None = None
    """Fake quantiser of expert weights and inputs; set from outside."""

    def __init__(self, config: K3Config, **factory: Any):
        super().__init__()
        c = config.moe
        assert c is not None
        hidden = config.hidden_size
        latent = c.latent_size or hidden
        self.gate = Router(config, **factory)
        self.experts = Experts(c.num_experts, c.intermediate_size, latent, **factory)
        self.has_latent = c.latent_size is not None
        self.has_norm = self.has_latent and c.latent_norm
        if self.has_latent:
            self.routed_expert_down_proj = Linear(hidden, latent, **factory)
            self.routed_expert_up_proj = Linear(latent, hidden, **factory)
        if self.has_norm:
            self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps, **factory)
        if c.num_shared_experts:
            # The shared experts are one MLP of their joint width: a sum of two is the same thing.
            self.shared_experts = GLU(config, c.num_shared_experts * c.intermediate_size, **factory)
        self.activation = activation(config)

    def forward(
        self, x_TD: Tensor, spans: Spans, routes_Tk: Tensor | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """x [T, D] (normalised) -> (y [T, D], chosen experts int64 [T, k], router statistics)."""
        chosen, stats = self.gate(x_TD, spans, routes_Tk)
        z_Tl = self.routed_expert_down_proj(x_TD) if self.has_latent else x_TD
        w = self.experts
        u_Tl = experts(
            z_Tl,
            chosen.indices_Tk,
            chosen.weights_Tk,
            w.w1.to(z_Tl.dtype),
            w.w3.to(z_Tl.dtype),
            w.w2.to(z_Tl.dtype),
            self.activation,
            quant=self.quant,
            dispatch=self.dispatch,
        )
        if self.has_norm:
            u_Tl = self.routed_expert_norm(u_Tl)
        y_TD = self.routed_expert_up_proj(u_Tl) if self.has_latent else u_Tl
        if hasattr(self, "shared_experts"):
            y_TD = y_TD + self.shared_experts(x_TD)
        return y_TD, chosen.indices_Tk, stats
