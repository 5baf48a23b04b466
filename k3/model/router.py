"""The router: fp32 sigmoid scores, a selection bias that only selects, un-biased renormalised
weights (report §2.3.3, eq. 13).

It returns the integers from which Quantile Balancing moves the bias; it never moves the bias
itself, so recomputation and
evaluation can't count a token twice.

Legend: T tokens, D hidden, n experts, k chosen, B bins.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3.model.config import K3Config
from k3.ops.quantile import histogram
from k3.ops.route import Route, route
from k3.ops.spans import Spans


class Router(nn.Module):
    e_score_correction_bias: Tensor

    def __init__(self, config: K3Config, **factory: Any):
        super().__init__()
        assert config.moe is not None
        self.config = config.moe
        shape = (self.config.num_experts, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, **factory))
        bias = torch.zeros(self.config.num_experts, **factory | {"dtype": torch.float32})
        self.register_buffer("e_score_correction_bias", bias)

    def forward(
        self, x_TD: Tensor, spans: Spans, routes_Tk: Tensor | None = None
    ) -> tuple[Route, dict[str, Any]]:
        """x [T, D] at full width -> (chosen experts with weights, statistics over the tokens
        that are not padding).
        """
        c = self.config
        wide = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
        scores_Tn = F.linear(x_TD.to(wide), self.weight.to(wide)).sigmoid()
        chosen = route(
            scores_Tn,
            self.e_score_correction_bias.to(wide),
            c.top_k,
            routes_Tk=routes_Tk,
            renormalize=c.renormalize,
            scale=c.routed_scaling_factor,
        )
        return chosen, self._statistics(scores_Tn.detach(), chosen, spans)

    @torch.no_grad()
    def _statistics(self, scores_Tn: Tensor, chosen: Route, spans: Spans) -> dict[str, Any]:
        c = self.config
        valid_T = spans.valid()
        picked = chosen.indices_Tk[valid_T].flatten()
        stats: dict[str, Any] = {}
        stats["expert_load"] = torch.bincount(picked, minlength=c.num_experts)
        if not self.training:
            return stats
        if c.balance == "quantile":
            bias = self.e_score_correction_bias
            stats["histogram"] = histogram(scores_Tn, chosen.cutoff_T, bias, valid_T, c.bins)
        elif c.balance == "quantile_exact":
            stats["margins"] = (scores_Tn[valid_T], chosen.cutoff_T[valid_T])
        return stats
