"""Where the parameters of a model are, and how many of them one token touches.

Names are those of `K3`, without the released prefix. "Active" counts all that a token multiplies:
the head, but not the embedding, which is looked up (the convention that gives the report's 104.2B).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ORDER = (
    "routed experts",
    "KDA",
    "shared experts",
    "MLA",
    "multi-head attention",
    "latent projections",
    "embedding",
    "head",
    "dense feed-forward",
    "router",
    "Attention Residuals",
    "norms",
    "multi-token prediction",
)


@dataclass(frozen=True)
class Part:
    name: str
    total: int
    active: float


def part_of(name: str, attention_kinds: Sequence[str]) -> str:
    """The row of the table that a parameter is counted in."""
    if name.startswith("mtp."):
        return "multi-token prediction"
    if name == "embed_tokens.weight":
        return "embedding"
    if name == "lm_head.weight":
        return "head"
    if "_res_norm" in name or "_res_proj" in name:
        return "Attention Residuals"
    if ".self_attn." in name:
        kind = attention_kinds[int(name.split(".")[1])]
        return {"kda": "KDA", "mla": "MLA", "mha": "multi-head attention"}[kind]
    for mark, part in (
        (".experts.", "routed experts"),
        (".shared_experts.", "shared experts"),
        (".routed_expert_", "latent projections"),
        (".gate.", "router"),
        (".mlp.", "dense feed-forward"),
    ):
        if mark in name:
            return part
    return "norms"


def count(sizes: Mapping[str, int], attention_kinds: Sequence[str], chosen: float) -> list[Part]:
    """The parts in the order of the report's table.

    `sizes` is the number of values of each parameter and selection bias, `chosen` the share of the
    routed experts that a token visits. Multi-token prediction is counted as inactive.
    """
    totals = dict.fromkeys(ORDER, 0)
    for name, size in sizes.items():
        totals[part_of(name, attention_kinds)] += size
    share = {"routed experts": chosen, "embedding": 0.0, "multi-token prediction": 0.0}
    # With tied embeddings there is no head of its own, and the embedding is what is multiplied.
    if not totals["head"]:
        share["embedding"] = 1.0
    return [
        Part(name, total, total * share.get(name, 1.0)) for name, total in totals.items() if total
    ]
