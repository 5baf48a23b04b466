"""Kimi Delta Attention: a delta rule with a decay per key channel, bounded below (report §2.1.1,
eq. 1-6).

Legend: T tokens, D hidden, H heads, K key and value width of a head, C = 3·H·K convolved channels,
N spans, P pool slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from k3.model.config import K3Config, KDAConfig
from k3.model.layers import Linear, Weight
from k3.model.state import State
from k3.ops.conv import short_conv
from k3.ops.kda import kda, kda_decode
from k3.ops.norm import gated_rms_norm
from k3.ops.spans import Spans


class KimiDeltaAttention(nn.Module):
    def __init__(self, config: K3Config, layer: int, **factory: Any):
        super().__init__()
        assert config.kda is not None
        c: KDAConfig = config.kda
        hidden, width = config.hidden_size, c.width
        fp32 = factory | {"dtype": torch.float32}
        self.config, self.layer, self.norm_eps = c, layer, config.rms_norm_eps
        self.q_proj = Linear(hidden, width, **factory)
        self.k_proj = Linear(hidden, width, **factory)
        self.v_proj = Linear(hidden, width, **factory)
        self.q_conv1d = Weight(width, 1, c.conv_size, **fp32)
        self.k_conv1d = Weight(width, 1, c.conv_size, **fp32)
        self.v_conv1d = Weight(width, 1, c.conv_size, **fp32)
        self.f_a_proj = Linear(hidden, c.head_dim, **factory)
        self.f_b_proj = Linear(c.head_dim, width, **factory)
        self.b_proj = Linear(hidden, c.num_heads, **factory)
        self.A_log = nn.Parameter(torch.empty(c.num_heads, **fp32))
        self.dt_bias = nn.Parameter(torch.empty(width, **fp32))
        if c.full_rank_gate:
            self.g_proj = Linear(hidden, width, **factory)
        else:
            self.g_a_proj = Linear(hidden, c.head_dim, **factory)
            self.g_b_proj = Linear(c.head_dim, width, **factory)
        self.o_norm = Weight(c.head_dim, **fp32)
        self.o_proj = Linear(width, hidden, **factory)

    def forward(self, x_TD: Tensor, spans: Spans, state: State | None) -> tuple[Tensor, None]:
        """x [T, D] (normalised) -> [T, D].

        With a state, its pool rows are read and written in place.
        """
        u_TC = torch.cat([self.q_proj(x_TD), self.k_proj(x_TD), self.v_proj(x_TD)], dim=-1)
        z_TW = self.f_b_proj(self.f_a_proj(x_TD))
        b_TH = self.b_proj(x_TD)
        if state is None:
            o_THK = self._from_zero(u_TC, z_TW, b_TH, spans)
        else:
            state.record(self.layer, {"u": u_TC, "z": z_TW, "b": b_TH})
            o_THK = self._from_state(u_TC, z_TW, b_TH, spans, state)
        gate_THK = self._gate(x_TD).view_as(o_THK)
        y_THK = gated_rms_norm(o_THK, gate_THK, self.o_norm.weight, self.norm_eps)
        return self.o_proj(y_THK.flatten(1)), None

    def _gate(self, x_TD: Tensor) -> Tensor:
        if self.config.full_rank_gate:
            return self.g_proj(x_TD)
        return self.g_b_proj(self.g_a_proj(x_TD))

    def _conv_weight(self) -> Tensor:
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        return torch.cat([conv.weight.squeeze(1) for conv in convs])

    def _heads(self, *flat: Tensor) -> list[Tensor]:
        return [x.unflatten(-1, (self.config.num_heads, self.config.head_dim)) for x in flat]

    def _from_zero(self, u_TC: Tensor, z_TW: Tensor, b_TH: Tensor, spans: Spans) -> Tensor:
        y_TC, _ = short_conv(u_TC, self._conv_weight(), spans)
        q, k, v, z = self._heads(*y_TC.chunk(3, dim=-1), z_TW)
        (dt_bias,) = self._heads(self.dt_bias)
        bound = self.config.lower_bound
        o_THK, _ = kda(q, k, v, z, b_TH, self.A_log, dt_bias, spans, lower_bound=bound)
        return o_THK

    def _from_state(
        self, u_TC: Tensor, z_TW: Tensor, b_TH: Tensor, spans: Spans, state: State
    ) -> Tensor:
        S_PHKV, window_PWC, slot_N = state.kda(self.layer)
        slot = slot_N.long()
        y_TC, window_NWC = short_conv(u_TC, self._conv_weight(), spans, window_PWC[slot])
        window_PWC[slot] = window_NWC.to(window_PWC.dtype)
        q, k, v, z = self._heads(*y_TC.chunk(3, dim=-1), z_TW)
        (dt_bias,) = self._heads(self.dt_bias)
        bound = self.config.lower_bound
        return kda_decode(
            q, k, v, z, b_TH, self.A_log, dt_bias, spans, S_PHKV, slot_N, lower_bound=bound
        )
