"""The shape of a model: one frozen dataclass tree, and the released configuration in and out.

Every idea of Kimi K3 has a named alternative here, so that each can be ablated alone. Fields that
the released `config.json` can say are written with its keys; the rest stands under
`text_config.openk3`.
Sources: Kimi K3 report §2, released `config.json`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from k3 import UserError

CONTROL_SLOTS = 256
RELEASED_FIRST_CONTROL = 163584

ATTENTION_KINDS = ("kda", "mla", "mha")
BALANCE_KINDS = ("quantile", "quantile_exact", "sign", "none")
ACTIVATIONS = {"situ": "situ", "swiglu": "silu"}


def control_id(vocab_size: int, released_id: int) -> int:
    """The id of a control token in a vocabulary of any size: V - 256 + (released id - 163584)."""
    return vocab_size - CONTROL_SLOTS + (released_id - RELEASED_FIRST_CONTROL)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise UserError(message)


@dataclass(frozen=True)
class KDAConfig:
    num_heads: int
    head_dim: int
    """Width of keys and of values."""
    conv_size: int = 4
    """Taps of the three short causal convolutions."""
    lower_bound: float | None = -5.0
    """Floor of the log-decay; None is Kimi Linear's softplus decay without a floor."""
    full_rank_gate: bool = True
    """False is Kimi Linear's output gate of rank `head_dim`."""

    def __post_init__(self) -> None:
        _require(
            min(self.num_heads, self.head_dim) > 0,
            f"kda: heads and head_dim must be positive, got {self}",
        )
        _require(self.conv_size >= 2, f"kda.conv_size must be at least 2, got {self.conv_size}")
        bound = self.lower_bound
        _require(
            bound is None or -5.0 <= bound < 0.0,
            f"kda.lower_bound must lie in [-5, 0) or be None, got {bound}",
        )

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class MLAConfig:
    num_heads: int
    q_lora_rank: int | None
    """Width of the query latent; None is a plain query projection."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    """Width of the key that all heads share; never rotated unless `rope_theta` is set."""
    v_head_dim: int
    output_gate: bool = True
    latent_norm_eps: float = 1e-6
    """eps of the two latent norms (the released code leaves 1e-6, not `rms_norm_eps`)."""
    rope_theta: float | None = None
    """None is K3's attention without positions; a number rotates the shared slice (K2-like)."""

    def __post_init__(self) -> None:
        sizes = (self.num_heads, self.kv_lora_rank, self.qk_nope_head_dim, self.v_head_dim)
        _require(min(sizes) > 0, f"mla: sizes must be positive, got {self}")
        _require(
            self.qk_rope_head_dim >= 0 and self.qk_rope_head_dim % 2 == 0,
            f"mla.qk_rope_head_dim must be even and not negative, got {self.qk_rope_head_dim}",
        )

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def row_width(self) -> int:
        """Cached values per token: the normed latent and the shared raw key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class MHAConfig:
    """Ordinary multi-head attention with rotary positions: the `plain` baseline."""

    num_heads: int
    head_dim: int
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        _require(self.num_heads > 0, f"mha.num_heads must be positive, got {self.num_heads}")
        _require(
            self.head_dim > 0 and self.head_dim % 2 == 0,
            f"mha.head_dim must be positive and even, got {self.head_dim}",
        )

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class AttnResConfig:
    kind: str = "block"
    """block: K3's, over finished blocks; full: over every sublayer; none: plain residual."""
    block_size: int = 12
    """Decoder layers per block (the paper counts sublayers: twice this)."""
    query: str = "learned"
    """learned from zero; uniform: frozen at zero (plain averages); random: frozen at random."""

    def __post_init__(self) -> None:
        _require(
            self.kind in ("block", "full", "none"),
            f"attnres.kind: block, full or none, got {self.kind!r}",
        )
        _require(
            self.query in ("learned", "uniform", "random"),
            f"attnres.query: learned, uniform or random, got {self.query!r}",
        )
        _require(self.block_size > 0, f"attnres.block_size must be positive, got {self.block_size}")


@dataclass(frozen=True)
class MoEConfig:
    num_experts: int
    top_k: int
    num_shared_experts: int
    intermediate_size: int
    """Hidden width of one expert, routed or shared."""
    latent_size: int | None
    """Width of the routed experts' input and output; None is a full-width MoE."""
    latent_norm: bool = True
    """RMSNorm of the routed sum before the up-projection (only with a latent)."""
    routed_scaling_factor: float = 1.0
    renormalize: bool = True
    balance: str = "quantile"
    """quantile: histogram Quantile Balancing; quantile_exact; sign: fixed-step rule; none."""
    sign_step: float = 1e-2
    bins: int = 1000

    def __post_init__(self) -> None:
        _require(
            0 < self.top_k <= self.num_experts,
            f"moe.top_k must lie in 1..num_experts, got {self.top_k} of {self.num_experts}",
        )
        _require(
            self.intermediate_size > 0,
            f"moe.intermediate_size must be positive, got {self.intermediate_size}",
        )
        _require(
            self.latent_size is None or self.latent_size > 0,
            f"moe.latent_size must be positive or None, got {self.latent_size}",
        )
        _require(
            self.num_shared_experts >= 0,
            f"moe.num_shared_experts: not negative, got {self.num_shared_experts}",
        )
        _require(
            self.balance in BALANCE_KINDS,
            f"moe.balance: one of {BALANCE_KINDS}, got {self.balance!r}",
        )
        _require(self.bins > 1, f"moe.bins must be above 1, got {self.bins}")


@dataclass(frozen=True)
class VisionConfig:
    """MoonViT-V2's shape as released; used to lay out and count the checkpoint."""

    patch_size: int = 14
    init_pos_emb_height: int = 64
    init_pos_emb_width: int = 64
    init_pos_emb_time: int = 4
    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_heads: int = 12
    num_layers: int = 27
    qkv_hidden_size: int = 1536
    merge_kernel: tuple[int, int] = (2, 2)


@dataclass(frozen=True)
class K3Config:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Hidden width of the dense feed-forward layers."""
    attn_layers: tuple[str, ...]
    """Attention kind of each decoder layer: kda, mla or mha."""
    kda: KDAConfig | None = None
    mla: MLAConfig | None = None
    mha: MHAConfig | None = None
    moe: MoEConfig | None = None
    """None makes every feed-forward layer dense."""
    attnres: AttnResConfig = field(default_factory=AttnResConfig)
    first_k_dense: int = 1
    """How many first layers are dense although `moe` is set."""
    activation: str = "situ"
    """situ: SiTU-GLU; swiglu."""
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    num_nextn_predict_layers: int = 0
    """Multi-token-prediction layers after the backbone."""
    mtp_loss_weight: float = 0.3
    max_position_embeddings: int = 1048576
    initializer_range: float | None = None
    """Standard deviation of matrices at the start; None is 1/sqrt(fan-in)."""
    pad_A_log: bool = False
    """Write A_log zero-padded to head_dim entries, as the released 2.8T checkpoint does."""
    vision: VisionConfig | None = None

    def __post_init__(self) -> None:
        _require(
            self.vocab_size > CONTROL_SLOTS,
            f"vocab_size must exceed the {CONTROL_SLOTS} control slots, got {self.vocab_size}",
        )
        _require(self.hidden_size > 0, f"hidden_size must be positive, got {self.hidden_size}")
        _require(len(self.attn_layers) > 0, "attn_layers: at least one layer is needed, got none")
        for kind in self.attn_layers:
            _require(
                kind in ATTENTION_KINDS, f"attn_layers: one of {ATTENTION_KINDS}, got {kind!r}"
            )
            _require(
                getattr(self, kind) is not None, f"attn_layers names {kind!r} but `{kind}` is None"
            )
        _require(
            self.activation in ACTIVATIONS,
            f"activation: one of {tuple(ACTIVATIONS)}, got {self.activation!r}",
        )
        if "mla" in self.attn_layers and "mha" in self.attn_layers:
            assert self.mla is not None and self.mha is not None
            heads = (self.mla.num_heads, self.mha.num_heads)
            _require(
                heads[0] == heads[1],
                f"mla and mha layers in one model need equal heads, got {heads[0]} and {heads[1]}",
            )
        _require(
            self.num_nextn_predict_layers == 0 or self.mla is not None,
            f"num_nextn_predict_layers {self.num_nextn_predict_layers} needs `mla`, got None",
        )
        _require(
            self.num_nextn_predict_layers in (0, 1),
            f"num_nextn_predict_layers: 0 or 1, got {self.num_nextn_predict_layers}",
        )

    @property
    def num_hidden_layers(self) -> int:
        return len(self.attn_layers)

    @property
    def bos_token_id(self) -> int:
        return control_id(self.vocab_size, 163584)

    @property
    def eos_token_id(self) -> int:
        """`<|end_of_msg|>`, the only stop id."""
        return control_id(self.vocab_size, 163586)

    @property
    def pad_token_id(self) -> int:
        return control_id(self.vocab_size, 163839)

    @property
    def media_placeholder_token_id(self) -> int:
        return control_id(self.vocab_size, 163605)

    def is_moe(self, layer: int) -> bool:
        """Whether decoder layer `layer` (from 0) routes to experts."""
        return self.moe is not None and layer >= self.first_k_dense

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_hidden_layers) if self.is_moe(layer))

    def with_(self, **changes: Any) -> K3Config:
        """A copy with fields replaced; `moe__top_k=4` reaches into the tree."""
        nested: dict[str, dict[str, Any]] = {}
        flat: dict[str, Any] = {}
        for key, value in changes.items():
            head, _, tail = key.partition("__")
            if tail:
                nested.setdefault(head, {})[tail] = value
            else:
                flat[head] = value
        for head, inner in nested.items():
            flat[head] = replace(getattr(self, head), **inner)
        return replace(self, **flat)

    def to_hf(self) -> dict[str, Any]:
        """The nested released `config.json`; what it cannot say is under `text_config.openk3`."""
        from k3.model.hf import to_hf

        return to_hf(self)

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> K3Config:
        """Reads a released `config.json`, nested or bare. UserError names the key that is wrong."""
        from k3.model.hf import from_hf

        return from_hf(config)
