"""Named shapes, and one depth dial that gives the family between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from k3 import UserError
from k3.model.config import (
    AttnResConfig,
    K3Config,
    KDAConfig,
    MHAConfig,
    MLAConfig,
    MoEConfig,
    VisionConfig,
)


def hybrid(num_layers: int, ratio: int = 3) -> tuple[str, ...]:
    """`ratio` KDA layers to one MLA layer, and always a final MLA layer (report §2.1)."""
    layers = ["mla" if layer % (ratio + 1) == ratio else "kda" for layer in range(num_layers)]
    return (*layers[:-1], "mla")


def nano() -> K3Config:
    """For a laptop CPU: every idea of K3 in at most 1.5M parameters."""
    return K3Config(
        vocab_size=2048,
        hidden_size=112,
        intermediate_size=224,
        attn_layers=hybrid(5),
        kda=KDAConfig(num_heads=2, head_dim=32),
        mla=MLAConfig(
            num_heads=2,
            q_lora_rank=48,
            kv_lora_rank=32,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=32,
        ),
        moe=MoEConfig(
            num_experts=16, top_k=4, num_shared_experts=2, intermediate_size=32, latent_size=64
        ),
        attnres=AttnResConfig(block_size=2),
        num_nextn_predict_layers=1,
        max_position_embeddings=4096,
    )


def family(depth: int) -> K3Config:
    """One dial: depth 12, 16 and 20 are the published mini-K3 widths 512, 768 and 1024."""
    if depth < 6:
        raise UserError(f"depth must be at least 6, got {depth} (nano is smaller)")
    hidden = 64 * (depth - 4)
    head_dim = 128 if hidden >= 512 else 64 if hidden >= 256 else 32
    heads = hidden // head_dim
    return K3Config(
        vocab_size=32768,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        attn_layers=hybrid(depth),
        kda=KDAConfig(num_heads=heads, head_dim=head_dim),
        mla=MLAConfig(
            num_heads=2 * heads,
            q_lora_rank=hidden // 2,
            kv_lora_rank=hidden // 2,
            qk_nope_head_dim=head_dim,
            qk_rope_head_dim=head_dim // 2,
            v_head_dim=head_dim,
        ),
        moe=MoEConfig(
            num_experts=256 if hidden >= 512 else 64,
            top_k=6,
            num_shared_experts=2,
            intermediate_size=hidden * 13 // 16 // 32 * 32,
            latent_size=hidden // 2,
        ),
        attnres=AttnResConfig(block_size=max(1, depth // 4)),
        num_nextn_predict_layers=1,
        max_position_embeddings=65536,
    )


def micro() -> K3Config:
    """About 10M active parameters: depth 8 at a vocabulary of 8,192."""
    return family(8).with_(vocab_size=8192)


def mini_r1() -> K3Config:
    """The public mini-K3 run: 1.02B in all, 145M active, K3's vocabulary (cluster1900, r1)."""
    return family(12).with_(
        vocab_size=163840,
        tie_word_embeddings=True,
        num_nextn_predict_layers=0,
        attnres__block_size=1,
    )


def mini() -> K3Config:
    """mini-r1 with a vocabulary of 32,768 and K3's MTP layer."""
    return mini_r1().with_(vocab_size=32768, num_nextn_predict_layers=1)


def small() -> K3Config:
    """The largest member that trains well on one H200: depth 20, 6.6B in all."""
    return family(20)


def kimi_k3() -> K3Config:
    """The released shape: 93 layers, 2.78T parameters."""
    return K3Config(
        vocab_size=163840,
        hidden_size=7168,
        intermediate_size=33792,
        attn_layers=hybrid(93),
        kda=KDAConfig(num_heads=96, head_dim=128),
        mla=MLAConfig(
            num_heads=96,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        ),
        moe=MoEConfig(
            num_experts=896,
            top_k=16,
            num_shared_experts=2,
            intermediate_size=3072,
            latent_size=3584,
        ),
        attnres=AttnResConfig(block_size=12),
        initializer_range=0.02,
        pad_A_log=True,
        vision=VisionConfig(),
    )


def kimi_linear() -> K3Config:
    """The released Kimi-Linear-48B-A3B: softplus decay, low-rank gate, SwiGLU, plain residual."""
    return K3Config(
        vocab_size=163840,
        hidden_size=2304,
        intermediate_size=9216,
        attn_layers=hybrid(27),
        kda=KDAConfig(num_heads=32, head_dim=128, lower_bound=None, full_rank_gate=False),
        mla=MLAConfig(
            num_heads=32,
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            output_gate=False,
        ),
        moe=MoEConfig(
            num_experts=256,
            top_k=8,
            num_shared_experts=1,
            intermediate_size=1024,
            latent_size=None,
            latent_norm=False,
            routed_scaling_factor=2.446,
        ),
        attnres=AttnResConfig(kind="none"),
        activation="swiglu",
        initializer_range=0.02,
    )


def k2_like(base: K3Config | None = None) -> K3Config:
    """The baseline: rotary MLA, no gate, SwiGLU, full-width MoE, sign rule, plain residual."""
    base = base or nano()
    assert base.mla is not None and base.moe is not None
    return base.with_(
        attn_layers=("mla",) * base.num_hidden_layers,
        kda=None,
        mla__output_gate=False,
        mla__rope_theta=50000.0,
        activation="swiglu",
        attnres=AttnResConfig(kind="none"),
        moe__latent_size=None,
        moe__latent_norm=False,
        moe__balance="sign",
        # Equal active width: a full-width expert costs hidden/latent times a latent one.
        moe__intermediate_size=full_width_expert(base),
    )


def full_width_expert(base: K3Config) -> int:
    """Width of routed and shared experts at which a full-width MoE has the latent one's active
    weights.
    """
    moe, hidden = base.moe, base.hidden_size
    assert moe is not None and moe.latent_size is not None
    active = (
        3 * moe.latent_size * moe.intermediate_size * moe.top_k
        + 2 * hidden * moe.latent_size
        + 3 * hidden * moe.intermediate_size * moe.num_shared_experts
    )
    width = active / (3 * hidden * (moe.top_k + moe.num_shared_experts))
    return max(8, round(width / 8) * 8)


def plain(base: K3Config | None = None) -> K3Config:
    """An ordinary pre-norm transformer (rotary, SwiGLU) with the active parameters of `base`."""
    base = base or nano()
    head_dim = 32 if base.hidden_size < 512 else 128
    heads = -(-base.hidden_size // head_dim)
    attention = 4 * base.hidden_size * heads * head_dim
    budget = _active_layer_weights(base) / base.num_hidden_layers - attention
    width = max(32, round(budget / (3 * base.hidden_size) / 8) * 8)
    return K3Config(
        vocab_size=base.vocab_size,
        hidden_size=base.hidden_size,
        intermediate_size=width,
        attn_layers=("mha",) * base.num_hidden_layers,
        mha=MHAConfig(num_heads=heads, head_dim=head_dim),
        attnres=AttnResConfig(kind="none"),
        activation="swiglu",
        tie_word_embeddings=base.tie_word_embeddings,
        max_position_embeddings=base.max_position_embeddings,
    )


def _active_layer_weights(c: K3Config) -> int:
    """Matrix weights that one token multiplies in the decoder layers (no embedding, head, MTP)."""
    assert c.kda is not None and c.mla is not None and c.moe is not None
    d, kda, mla, moe = c.hidden_size, c.kda, c.mla, c.moe
    kda_weights = (
        5 * d * kda.width + d * kda.head_dim + kda.head_dim * kda.width + d * kda.num_heads
    )
    q_rank = mla.q_lora_rank or 0
    queries = mla.num_heads * mla.qk_head_dim
    mla_weights = (
        (d * q_rank + q_rank * queries if q_rank else d * queries)
        + d * mla.row_width
        + mla.kv_lora_rank * mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        + (2 if mla.output_gate else 1) * d * mla.num_heads * mla.v_head_dim
    )
    latent = moe.latent_size or d
    moe_weights = (
        3 * latent * moe.intermediate_size * moe.top_k
        + (2 * d * latent if moe.latent_size else 0)
        + 3 * d * moe.intermediate_size * moe.num_shared_experts
        + d * moe.num_experts
    )
    num_moe = len(c.moe_layers)
    return (
        c.attn_layers.count("kda") * kda_weights
        + c.attn_layers.count("mla") * mla_weights
        + num_moe * moe_weights
        + (c.num_hidden_layers - num_moe) * 3 * d * c.intermediate_size
    )


PRESETS: dict[str, Callable[[], K3Config]] = {
    "nano": nano,
    "micro": micro,
    "mini-r1": mini_r1,
    "mini": mini,
    "small": small,
    "kimi-k3": kimi_k3,
    "kimi-linear": kimi_linear,
    "k2-like": k2_like,
    "plain": plain,
}


def preset(name: str, **changes: Any) -> K3Config:
    """The named shape with fields replaced; `moe__top_k=4` reaches into the tree.

    UserError on an unknown name.
    """
    if name not in PRESETS:
        raise UserError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
    return PRESETS[name]().with_(**changes)
