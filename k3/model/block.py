"""One decoder layer: attention and feed-forward, each reading a mixture over depth (report §2.2).

Legend: T tokens, D hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from k3.model.attnres import Depth, DepthMixing
from k3.model.config import K3Config
from k3.model.glu import GLU
from k3.model.kda import KimiDeltaAttention
from k3.model.layers import RMSNorm
from k3.model.mha import MultiHeadAttention
from k3.model.mla import GatedMLA
from k3.model.moe import LatentMoE
from k3.model.state import State
from k3.ops.spans import Spans

ATTENTION = {"kda": KimiDeltaAttention, "mla": GatedMLA, "mha": MultiHeadAttention}


class LayerOut(NamedTuple):
    depth: Depth
    routes_Tk: Tensor | None
    """Chosen experts; None in a dense layer."""
    max_logit_H: Tensor | None
    """Largest attention logit of each head; None in a KDA layer, whose logits are bounded by
    construction.
    """
    stats: dict[str, Any]


class DecoderLayer(DepthMixing):
    def __init__(self, config: K3Config, layer: int, **factory: Any):
        super().__init__(config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.layer = layer
        kind, size = config.attnres.kind, config.attnres.block_size
        self.starts_block = kind == "full" or (kind == "block" and layer % size == 0)
        self.splits_inside = kind == "full"
        self.add_query("self_attention_res", config, **factory)
        self.input_layernorm = RMSNorm(hidden, eps, **factory)
        self.self_attn = ATTENTION[config.attn_layers[layer]](config, layer, **factory)
        self.add_query("mlp_res", config, **factory)
        self.post_attention_layernorm = RMSNorm(hidden, eps, **factory)
        if config.is_moe(layer):
            self.block_sparse_moe = LatentMoE(config, **factory)
        else:
            self.mlp = GLU(config, config.intermediate_size, **factory)

    def forward(
        self, depth: Depth, spans: Spans, state: State | None, routes_Tk: Tensor | None
    ) -> LayerOut:
        sublayer = 2 * self.layer
        x_TD = self.input_layernorm(depth.read(self.query("self_attention_res"), sublayer))
        y_TD, max_logit_H = self.self_attn(x_TD, spans, state)
        depth = depth.add(y_TD)
        if self.splits_inside:
            depth = depth.close()
        x_TD = self.post_attention_layernorm(depth.read(self.query("mlp_res"), sublayer + 1))
        if hasattr(self, "mlp"):
            return LayerOut(depth.add(self.mlp(x_TD)), None, max_logit_H, {})
        y_TD, routes_Tk, stats = self.block_sparse_moe(x_TD, spans, routes_Tk)
        return LayerOut(depth.add(y_TD), routes_Tk, max_logit_H, stats)
