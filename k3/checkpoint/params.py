"""How many parameters a configuration has, by part, and what one token costs: no tensor is made.

"Active" is what one token multiplies: the head, but not the embedding, which is looked up, and of
the routed experts the chosen ones. That convention gives the report's 104.2B (Table 1). MTP layers
aren't part of the network that answers, so they count as inactive.

A product of a row with an [out, in] matrix is 2·out·in operations. Legend: D hidden, H heads, K key
width, V value width, S sources of a mixture.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from k3.checkpoint.layout import Shape, attention_shapes, model_shapes, vision_shapes
from k3.model.config import K3Config

EMBEDDING, HEAD, MTP = "embedding", "lm_head", "multi-token prediction"
ROUTED, RESIDUALS, NORMS, VISION = "routed experts", "AttnRes", "RMSNorms", "vision"
ATTENTION = {"kda": "KDA", "mla": "MLA", "mha": "multi-head attention"}
MARKS = {
    ".experts.": ROUTED,
    ".shared_experts.": "shared experts",
    ".routed_expert_": "latent projections",
    ".gate.": "router",
    ".mlp.": "dense feed-forward",
}
ORDER = (ROUTED, "KDA", "shared experts", "MLA", "multi-head attention", "latent projections",
         EMBEDDING, HEAD, "dense feed-forward", "router", RESIDUALS, NORMS, MTP)  # fmt: skip


@dataclass(frozen=True)
class Part:
    name: str
    total: int
    active: float
    """Per token; fractional where a share of equal experts is chosen."""


def parts(config: K3Config) -> list[Part]:
    """The text network by part, in the order of `ORDER`; parts that don't occur are left out.

    Selection biases count, zeros that pad A_log do not.
    """
    totals = dict.fromkeys(ORDER, 0)
    for name, shape in model_shapes(config):
        totals[part_of(name, config)] += prod(shape)
    return [Part(name, n, n * _share(name, config)) for name, n in totals.items() if n]


def part_of(name: str, config: K3Config) -> str:
    """Which part a parameter of `K3` is counted in."""
    if name.startswith("mtp."):
        return MTP
    if name in ("embed_tokens.weight", "lm_head.weight"):
        return EMBEDDING if name.startswith("embed") else HEAD
    if "_res_norm" in name or "_res_proj" in name:
        return RESIDUALS
    if ".self_attn." in name:
        return ATTENTION[config.attn_layers[int(name.split(".")[1])]]
    return next((part for mark, part in MARKS.items() if mark in name), NORMS)


def _share(part: str, config: K3Config) -> float:
    """Of a part's parameters, how many one token multiplies."""
    if part == ROUTED:
        assert config.moe is not None
        return config.moe.top_k / config.moe.num_experts
    if part == EMBEDDING:
        return 1.0 if config.tie_word_embeddings else 0.0
    return 0.0 if part == MTP else 1.0


def total_params(config: K3Config) -> int:
    """Of the text network."""
    return sum(part.total for part in parts(config))


def active_params(config: K3Config) -> float:
    """Of the text network, per token."""
    return sum(part.active for part in parts(config))


def vision_params(config: K3Config) -> int:
    """Of the vision tower and its projector."""
    if config.vision is None:
        return 0
    return sum(prod(shape) for _, shape in vision_shapes(config.vision, config.hidden_size))


def param_rows(config: K3Config) -> list[dict[str, Any]]:
    """Rows for a table: part, parameters, share, active; then the text total, and with a vision
    tower its own row and the model total.
    """
    rows: list[dict[str, Any]] = []
    total, active = total_params(config), round(active_params(config))
    for part in parts(config):
        rows.append(_row(part.name, part.total, f"{part.total / total:.2%}", round(part.active)))
    rows.append(_row("text total", total, "100.00%", active))
    if config.vision is not None:
        vision = vision_params(config)
        rows.append(_row("vision tower and projector", vision, "", None))
        rows.append(_row("model total", total + vision, "", None))
    return rows


def _row(part: str, total: int, share: str, active: int | None) -> dict[str, Any]:
    return {"part": part, "parameters": total, "share": share, "active": active}


def module_rows(config: K3Config) -> list[dict[str, Any]]:
    """Parameters of one module of each kind: module, parameters."""
    sizes = {
        f"{ATTENTION[kind]} layer": sum(prod(s) for _, s in attention_shapes(config, kind))
        for kind in ATTENTION
        if kind in config.attn_layers
    }
    moe = config.moe
    if moe is not None:
        latent = moe.latent_size or config.hidden_size
        sizes["one routed expert"] = 3 * latent * moe.intermediate_size
        layers = len(config.moe_layers)
        for name in ("latent projections", "shared experts", "router"):
            total = next((part.total for part in parts(config) if part.name == name), 0)
            sizes |= {name: total // layers} if total and layers else {}
    if moe is None or config.first_k_dense:
        sizes["dense feed-forward"] = 3 * config.hidden_size * config.intermediate_size
    return [{"module": name, "parameters": size} for name, size in sizes.items()]


def flops_per_token(config: K3Config, context: int) -> dict[str, float]:
    """Forward operations for one token of a sequence of `context` tokens, on average over its
    tokens: by kind, `forward` in all, and `training`, three times that with the MTP layer.

    matrices: projections, experts, convolutions and head. softmax: scores and sums over the
    (context + 1) / 2 tokens seen on average, MLA with its keys and values expanded. kda: the
    recurrence, 7·H·K·V. attnres: scores and sums over the sources of each mixture. Norms,
    activations and the router's choice are left out.
    """
    keys = (context + 1) / 2
    kinds = {
        "matrices": 2.0 * sum(_multiplied(n, s, config) for n, s in _backbone(config)),
        "softmax": keys * sum(_per_key(config, kind) for kind in config.attn_layers),
        "kda": float(_recurrence(config)),
        "attnres": 4.0 * config.hidden_size * sum(mixture_sizes(config)),
    }
    if config.tie_word_embeddings:
        kinds["matrices"] += 2.0 * config.vocab_size * config.hidden_size
    forward = sum(kinds.values())
    mtp = _mtp_flops(config, keys)
    return kinds | {"forward": forward, "mtp": mtp, "training": 3 * (forward + mtp)}


def flops_rows(config: K3Config, context: int) -> list[dict[str, Any]]:
    """`flops_per_token` as rows for a table: kind, operations per token."""
    found = flops_per_token(config, context)
    return [{"kind": kind, "per token": round(value)} for kind, value in found.items() if value]


def mixture_sizes(config: K3Config) -> list[int]:
    """Sources of each mixture over depth that isn't a copy, in the order they're read."""
    if config.attnres.kind == "none":
        return []
    layers, size = config.num_hidden_layers, config.attnres.block_size
    if config.attnres.kind == "full":
        sources = list(range(1, 2 * layers + 2))
    else:
        inside = [(layer // size + 1, layer % size > 0) for layer in range(layers)]
        sources = [count for rows, prefix in inside for count in (rows + prefix, rows + 1)]
        sources.append((layers - 1) // size + 2)
    return [count for count in sources if count > 1]


def _backbone(config: K3Config) -> list[tuple[str, Shape]]:
    return [(n, s) for n, s in model_shapes(config) if not n.startswith("mtp.")]


def _multiplied(name: str, shape: Shape, config: K3Config) -> float:
    """Weights of a tensor that one token is multiplied with; pseudo-queries are counted by use."""
    if len(shape) < 2 or name == "embed_tokens.weight" or name.endswith("_res_proj.weight"):
        return 0.0
    share = _share(ROUTED, config) if ".experts." in name else 1.0
    return prod(shape) * share


def _per_key(config: K3Config, kind: str) -> float:
    """Operations of one query token for each key, over all heads."""
    if kind == "mla":
        assert config.mla is not None
        return 2.0 * config.mla.num_heads * (config.mla.qk_head_dim + config.mla.v_head_dim)
    if kind == "mha":
        assert config.mha is not None
        return 4.0 * config.mha.width
    return 0.0


def _recurrence(config: K3Config) -> int:
    """Decay 1, read by the key 2, rank-one write 2, read by the query 2, for each state entry."""
    layers = config.attn_layers.count("kda")
    if not layers:
        return 0
    assert config.kda is not None
    return 7 * layers * config.kda.num_heads * config.kda.head_dim**2


def _mtp_flops(config: K3Config, keys: float) -> float:
    if not config.num_nextn_predict_layers:
        return 0.0
    inside = [(n, s) for n, s in model_shapes(config) if n.startswith("mtp.")]
    head = config.vocab_size * config.hidden_size * config.num_nextn_predict_layers
    matrices = sum(_multiplied(n, s, config) for n, s in inside) + head
    return 2.0 * matrices + keys * _per_key(config, "mla") * config.num_nextn_predict_layers
