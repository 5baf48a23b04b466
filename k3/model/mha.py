"""Ordinary multi-head attention with rotary positions: the `plain` baseline.

Legend: T tokens, D hidden, H heads, K head width, N spans. A cached row is the keys of all heads,
then the values.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3.model.config import K3Config, MHAConfig
from k3.model.layers import Linear
from k3.model.rope import rotate
from k3.model.state import State
from k3.ops.mla import attention, write_rows
from k3.ops.spans import Spans


class MultiHeadAttention(nn.Module):
    def __init__(self, config: K3Config, layer: int, **factory: Any):
        super().__init__()
        assert config.mha is not None
        c: MHAConfig = config.mha
        self.config, self.layer, self.scale = c, layer, c.head_dim**-0.5
        self.q_proj = Linear(config.hidden_size, c.width, **factory)
        self.k_proj = Linear(config.hidden_size, c.width, **factory)
        self.v_proj = Linear(config.hidden_size, c.width, **factory)
        self.o_proj = Linear(c.width, config.hidden_size, **factory)

    def forward(
        self, x_TD: Tensor, spans: Spans, state: State | None
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, D] (normalised) -> ([T, D], largest logit of each head fp32 [H], or None on a
        cache).
        """
        positions = spans.positions()
        if state is not None:
            positions = positions + state.mla(self.layer)[2].long()[spans.segments()]
        shape = (self.config.num_heads, self.config.head_dim)
        q = rotate(self.q_proj(x_TD).unflatten(-1, shape), positions, self.config.rope_theta)
        k = rotate(self.k_proj(x_TD).unflatten(-1, shape), positions, self.config.rope_theta)
        v = self.v_proj(x_TD).unflatten(-1, shape)
        max_logit_H = None
        if state is None:
            o_THK, max_logit_H = attention(q, k, v, spans, scale=self.scale)
        else:
            rows = torch.cat([k.flatten(1), v.flatten(1)], dim=-1)
            write_rows(rows, *state.mla(self.layer), spans)
            o_THK = self._cached(q, spans, state)
        return self.o_proj(o_THK.flatten(1).to(x_TD.dtype)), max_logit_H

    def _cached(self, q_THK: Tensor, spans: Spans, state: State) -> Tensor:
        pages, table, length = state.mla(self.layer)
        outputs = []
        for n, (start, size, before) in enumerate(
            zip(spans.offsets, spans.lengths, length.tolist(), strict=False)
        ):
            rows = pages[table[n].long()].flatten(0, 1)[: before + size]
            k, v = (x.unflatten(-1, q_THK.shape[1:]) for x in rows.chunk(2, dim=-1))
            seen = torch.arange(before + size, device=rows.device)
            mask = seen[None] <= (before + torch.arange(size, device=rows.device))[:, None]
            q = q_THK[start : start + size]
            o = F.scaled_dot_product_attention(
                q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), mask, scale=self.scale
            )
            outputs.append(o.transpose(0, 1))
        return torch.cat(outputs) if outputs else q_THK
