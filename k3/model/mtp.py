"""The multi-token-prediction layer: from the final mixture and the next token's embedding to the
token after it.

`eh_proj [enorm(next embedding); hnorm(final mix)]` -> one MLA + MoE layer with a plain residual ->
the shared head.
Source: report Table 1 and §4.1.4 (one MTP layer in pretraining); names as the engines that load
such layers spell them.

Legend: T tokens, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from k3.model.attnres import Depth
from k3.model.block import LayerOut
from k3.model.config import K3Config
from k3.model.glu import GLU
from k3.model.layers import Linear, RMSNorm
from k3.model.mla import GatedMLA
from k3.model.moe import LatentMoE
from k3.model.state import State
from k3.ops.spans import Spans


class SharedHead(nn.Module):
    """The norm before the head that the backbone and the MTP layer share."""

    def __init__(self, config: K3Config, **factory: Any):
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **factory)


class MTPLayer(nn.Module):
    def __init__(self, config: K3Config, index: int, **factory: Any):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(hidden, eps, **factory)
        self.hnorm = RMSNorm(hidden, eps, **factory)
        self.eh_proj = Linear(2 * hidden, hidden, **factory)
        self.input_layernorm = RMSNorm(hidden, eps, **factory)
        self.self_attn = GatedMLA(config, config.num_hidden_layers + index, **factory)
        self.post_attention_layernorm = RMSNorm(hidden, eps, **factory)
        if config.moe is not None:
            self.block_sparse_moe = LatentMoE(config, **factory)
        else:
            self.mlp = GLU(config, config.intermediate_size, **factory)
        self.shared_head = SharedHead(config, **factory)

    def forward(
        self,
        h_TD: Tensor,
        next_embeds_TD: Tensor,
        spans: Spans,
        state: State | None,
        routes_Tk: Tensor | None,
    ) -> LayerOut:
        """h [T, D] before the final norm, next_embeds [T, D] of the following token."""
        pair = torch.cat([self.enorm(next_embeds_TD), self.hnorm(h_TD)], dim=-1)
        x_TD = self.eh_proj(pair)
        y_TD, max_logit_H = self.self_attn(self.input_layernorm(x_TD), spans, state)
        x_TD = x_TD + y_TD
        normed = self.post_attention_layernorm(x_TD)
        if hasattr(self, "mlp"):
            return LayerOut(Depth((), x_TD + self.mlp(normed)), None, max_logit_H, {})
        y_TD, routes_Tk, stats = self.block_sparse_moe(normed, spans, routes_Tk)
        return LayerOut(Depth((), x_TD + y_TD), routes_Tk, max_logit_H, stats)

    def head_input(self, h_TD: Tensor) -> Tensor:
        """What the shared head multiplies."""
        return self.shared_head.norm(h_TD)
