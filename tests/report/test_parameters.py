"""The parameter table counts everything once and knows what a token touches."""

import pytest

from k3.report.parameters import ORDER, count, part_of

SIZES = {
    "embed_tokens.weight": 1000,
    "layers.0.self_attn.q_proj.weight": 10,
    "layers.0.mlp.gate_proj.weight": 20,
    "layers.0.input_layernorm.weight": 3,
    "layers.0.self_attention_res_proj.weight": 4,
    "layers.1.self_attn.q_a_proj.weight": 11,
    "layers.1.block_sparse_moe.experts.w1": 800,
    "layers.1.block_sparse_moe.shared_experts.up_proj.weight": 50,
    "layers.1.block_sparse_moe.routed_expert_norm.weight": 5,
    "layers.1.block_sparse_moe.gate.e_score_correction_bias": 8,
    "output_attn_res_norm.weight": 4,
    "norm.weight": 3,
    "lm_head.weight": 900,
    "mtp.0.self_attn.q_a_proj.weight": 70,
}


def test_every_parameter_is_counted_once():
    parts = {part.name: part for part in count(SIZES, ("kda", "mla"), 2 / 8)}
    assert sum(part.total for part in parts.values()) == sum(SIZES.values())
    assert {name: part.total for name, part in parts.items()} == {
        "routed experts": 800,
        "KDA": 10,
        "shared experts": 50,
        "MLA": 11,
        "latent projections": 5,
        "embedding": 1000,
        "head": 900,
        "dense feed-forward": 20,
        "router": 8,
        "Attention Residuals": 8,
        "norms": 6,
        "multi-token prediction": 70,
    }
    assert parts["routed experts"].active == 200
    assert parts["embedding"].active == parts["multi-token prediction"].active == 0
    assert parts["head"].active == 900


def test_a_tied_embedding_is_active():
    sizes = {name: size for name, size in SIZES.items() if name != "lm_head.weight"}
    active = {part.name: part.active for part in count(sizes, ("kda", "mla"), 0.25)}
    assert active["embedding"] == 1000


@pytest.mark.parametrize("kind", ["kda", "mla", "mha"])
def test_attention_goes_to_its_kind(kind: str):
    assert part_of("layers.0.self_attn.o_proj.weight", (kind,)) in ORDER
