"""Gated multi-head latent attention without positions (report §2.1.2).

Expanded over heads for training and for a prefill from nothing; absorbed into the latent for
everything on a cache.

Legend: T tokens, D hidden, H heads, n nope width, s shared width, v value width, R latent width, P
pages, B rows per page,
N spans, M pages per span.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from k3.model.config import K3Config, MLAConfig
from k3.model.layers import Linear, RMSNorm
from k3.model.rope import rotate
from k3.model.state import State
from k3.ops.mla import attention, latent_attention, write_rows
from k3.ops.spans import Spans


class GatedMLA(nn.Module):
    def __init__(self, config: K3Config, layer: int, **factory: Any):
        super().__init__()
        assert config.mla is not None
        c: MLAConfig = config.mla
        hidden, eps, heads = config.hidden_size, c.latent_norm_eps, c.num_heads
        self.config, self.layer = c, layer
        self.scale = c.qk_head_dim**-0.5
        if c.q_lora_rank is None:
            self.q_proj = Linear(hidden, heads * c.qk_head_dim, **factory)
        else:
            self.q_a_proj = Linear(hidden, c.q_lora_rank, **factory)
            self.q_a_layernorm = RMSNorm(c.q_lora_rank, eps, **factory)
            self.q_b_proj = Linear(c.q_lora_rank, heads * c.qk_head_dim, **factory)
        self.kv_a_proj_with_mqa = Linear(hidden, c.row_width, **factory)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, eps, **factory)
        kv_width = heads * (c.qk_nope_head_dim + c.v_head_dim)
        self.kv_b_proj = Linear(c.kv_lora_rank, kv_width, **factory)
        if c.output_gate:
            self.g_proj = Linear(hidden, heads * c.v_head_dim, **factory)
        self.o_proj = Linear(heads * c.v_head_dim, hidden, **factory)

    def forward(self, x_TD: Tensor, spans: Spans, state: State | None) -> tuple[Tensor, Tensor]:
        """x [T, D] (normalised) -> ([T, D], largest logit of each head fp32 [H])."""
        positions = self._positions(spans, state)
        q_THq = self._queries(x_TD, positions)
        rows_TR = self._rows(x_TD, positions)
        if state is not None:
            state.record(self.layer, {"rows": rows_TR})
            write_rows(rows_TR, *state.mla(self.layer), spans)
        if state is None or state.empty:
            o_THv, max_logit_H = self._expanded(q_THq, rows_TR, spans)
        else:
            o_THv, max_logit_H = self._absorbed(q_THq, spans, state)
        o_TW = o_THv.flatten(1)
        if self.config.output_gate:
            # The attention output is still fp32 here; it is rounded once, after the gate.
            o_TW = o_TW * self.g_proj(x_TD).to(o_TW.dtype).sigmoid()
        return self.o_proj(o_TW.to(x_TD.dtype)), max_logit_H

    def _positions(self, spans: Spans, state: State | None) -> Tensor | None:
        if self.config.rope_theta is None:
            return None
        if state is None:
            return spans.positions()
        return spans.positions() + state.mla(self.layer)[2].long()[spans.segments()]

    def _queries(self, x_TD: Tensor, positions_T: Tensor | None) -> Tensor:
        c = self.config
        if c.q_lora_rank is None:
            q_TW = self.q_proj(x_TD)
        else:
            q_TW = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TD)))
        q_THq = q_TW.unflatten(-1, (c.num_heads, c.qk_head_dim))
        if positions_T is None:
            return q_THq
        q_n, q_s = q_THq.split((c.qk_nope_head_dim, c.qk_rope_head_dim), dim=-1)
        return torch.cat([q_n, rotate(q_s, positions_T, self._theta)], dim=-1)

    def _rows(self, x_TD: Tensor, positions_T: Tensor | None) -> Tensor:
        """What is cached per token: the latent after its norm, and the shared key as it is."""
        c = self.config
        latent, shared = self.kv_a_proj_with_mqa(x_TD).split(
            (c.kv_lora_rank, c.qk_rope_head_dim), dim=-1
        )
        if positions_T is not None:
            shared = rotate(shared.unsqueeze(1), positions_T, self._theta).squeeze(1)
        return torch.cat([self.kv_a_layernorm(latent), shared], dim=-1)

    @property
    def _theta(self) -> float:
        assert self.config.rope_theta is not None
        return self.config.rope_theta

    def _expanded(self, q_THq: Tensor, rows_TR: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
        c = self.config
        latent, shared = rows_TR.split((c.kv_lora_rank, c.qk_rope_head_dim), dim=-1)
        kv_THw = self.kv_b_proj(latent).unflatten(-1, (c.num_heads, -1))
        k_n, v_THv = kv_THw.split((c.qk_nope_head_dim, c.v_head_dim), dim=-1)
        k_THq = torch.cat([k_n, shared.unsqueeze(1).expand(-1, c.num_heads, -1)], dim=-1)
        return attention(q_THq, k_THq, v_THv, spans, scale=self.scale)

    def _absorbed(self, q_THq: Tensor, spans: Spans, state: State) -> tuple[Tensor, Tensor]:
        c = self.config
        weight_HwR = self.kv_b_proj.weight.to(q_THq.dtype).unflatten(0, (c.num_heads, -1))
        up_k_HnR, up_v_HvR = weight_HwR.split((c.qk_nope_head_dim, c.v_head_dim), dim=1)
        q_n, q_s = q_THq.split((c.qk_nope_head_dim, c.qk_rope_head_dim), dim=-1)
        q_THR = torch.cat([torch.einsum("thn,hnr->thr", q_n, up_k_HnR), q_s], dim=-1)
        o_THR, max_logit_H = latent_attention(
            q_THR, *state.mla(self.layer), spans, scale=self.scale, value_dim=c.kv_lora_rank
        )
        return torch.einsum("thr,hvr->thv", o_THR, up_v_HvR.to(o_THR.dtype)), max_logit_H
