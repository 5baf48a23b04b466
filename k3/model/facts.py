"""Which parameter is what: the one place that reads parameter names, so that no other room has
to.
"""

from __future__ import annotations

from torch import Tensor

from k3.model.config import K3Config
from k3.ops.facts import ParamFacts

FP32_ISLANDS = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")


def is_fp32_island(name: str) -> bool:
    """Parameters and buffers that stay fp32 whatever the rest is: decay, convolutions, head
    norm, selection bias.
    """
    return name.endswith(FP32_ISLANDS)


def facts_of(name: str, parameter: Tensor, config: K3Config) -> ParamFacts:
    """The facts of one parameter of `K3`."""
    parent, _, leaf = name.rpartition(".")
    module = parent.rpartition(".")[2]
    if name == "embed_tokens.weight":
        return ParamFacts("embedding", decay=True)
    if name == "lm_head.weight":
        return ParamFacts("head", decay=True)
    if leaf in ("A_log", "dt_bias"):
        return ParamFacts("vector", decay=False)
    if module.endswith("conv1d"):
        return ParamFacts("conv", decay=False)
    if module.endswith("res_proj"):
        return ParamFacts("query", decay=False, frozen=not parameter.requires_grad)
    if "norm" in module:
        return ParamFacts("norm", decay=False, frozen=not parameter.requires_grad)
    if module == "experts":
        return ParamFacts("expert", decay=True, expert_axis=0)
    if module == "gate":
        return ParamFacts("router", decay=True)
    return _projection(name, module, config)


def _projection(name: str, module: str, config: K3Config) -> ParamFacts:
    """Query, key and value projections are cut by head; every other matrix is whole (report
    §2.5).
    """
    if ".self_attn." not in f".{name}":
        return ParamFacts("matrix", decay=True)
    layer = _attention_layer(name, config)
    kinds = config.attn_layers + ("mla",) * config.num_nextn_predict_layers
    if kinds[layer] == "kda" and module in ("q_proj", "k_proj", "v_proj"):
        assert config.kda is not None
        return ParamFacts("matrix", True, config.kda.num_heads, (config.kda.head_dim,))
    if kinds[layer] == "mha" and module in ("q_proj", "k_proj", "v_proj"):
        assert config.mha is not None
        half = ((config.mha.head_dim, 0.5),) if module != "v_proj" else ()
        logits = _logits_row(layer, kinds) if half else None
        rows = (config.mha.head_dim,)
        return ParamFacts("matrix", True, config.mha.num_heads, rows, logits=logits, clip=half)
    if kinds[layer] == "mla" and module in ("q_proj", "q_b_proj", "kv_b_proj"):
        return _mla_projection(module, _logits_row(layer, kinds), config)
    return ParamFacts("matrix", decay=True)


def _mla_projection(module: str, logits: int, config: K3Config) -> ParamFacts:
    c = config.mla
    assert c is not None
    if module == "kv_b_proj":
        rows: tuple[int, ...] = (c.qk_nope_head_dim, c.v_head_dim)
        clip = ((c.qk_nope_head_dim, 0.5), (c.v_head_dim, 0.0))
    else:
        # The shared key serves all heads and is left alone, so the head's own rows against it take
        # all of gamma.
        rows = (c.qk_head_dim,)
        clip = ((c.qk_nope_head_dim, 0.5), (c.qk_rope_head_dim, 1.0))
    return ParamFacts("matrix", True, c.num_heads, rows, logits=logits, clip=clip)


def _attention_layer(name: str, config: K3Config) -> int:
    section, index = name.split(".")[:2]
    return int(index) + (config.num_hidden_layers if section == "mtp" else 0)


def _logits_row(layer: int, kinds: tuple[str, ...]) -> int:
    """Row of stats["max_logit"]: layers with a softmax, backbone first, then MTP."""
    return sum(kind != "kda" for kind in kinds[:layer])
