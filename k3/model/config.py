"""The shape of a model: one frozen dataclass tree, and the released configuration in and out.

Every idea of Kimi K3 has a named alternative here, so that each can be ablated alone. Fields that the released
`config.json` can say are written with its keys; the rest stands under `text_config.openk3`.
Sources: Kimi K3 report §2, released `config.json`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
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
        _require(min(self.num_heads, self.head_dim) > 0, f"kda: heads and head_dim must be positive, got {self}")
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
    """eps of the two latent norms (the released code leaves them at 1e-6, not at `rms_norm_eps`)."""
    rope_theta: float | None = None
    """None is K3's attention without positions; a number rotates the shared slice (the K2-like baseline)."""

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
    """block: K3's Attention Residuals over finished blocks; full: over every sublayer; none: plain residual."""
    block_size: int = 12
    """Decoder layers per block (the paper counts sublayers: twice this)."""
    query: str = "learned"
    """learned from zero; uniform: frozen at zero (plain averages); random: frozen at random."""

    def __post_init__(self) -> None:
        _require(self.kind in ("block", "full", "none"), f"attnres.kind: block, full or none, got {self.kind!r}")
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
        _require(self.intermediate_size > 0, f"moe.intermediate_size must be positive, got {self.intermediate_size}")
        _require(
            self.latent_size is None or self.latent_size > 0,
            f"moe.latent_size must be positive or None, got {self.latent_size}",
        )
        _require(self.num_shared_experts >= 0, f"moe.num_shared_experts: not negative, got {self.num_shared_experts}")
        _require(self.balance in BALANCE_KINDS, f"moe.balance: one of {BALANCE_KINDS}, got {self.balance!r}")
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


_VISION_KEYS = {
    "patch_size": "patch_size",
    "init_pos_emb_height": "init_pos_emb_height",
    "init_pos_emb_width": "init_pos_emb_width",
    "init_pos_emb_time": "init_pos_emb_time",
    "hidden_size": "vt_hidden_size",
    "intermediate_size": "vt_intermediate_size",
    "num_heads": "vt_num_attention_heads",
    "num_layers": "vt_num_hidden_layers",
    "qkv_hidden_size": "qkv_hidden_size",
    "merge_kernel": "merge_kernel_size",
}


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
            _require(kind in ATTENTION_KINDS, f"attn_layers: one of {ATTENTION_KINDS}, got {kind!r}")
            _require(getattr(self, kind) is not None, f"attn_layers names {kind!r} but `{kind}` is None")
        _require(self.activation in ACTIVATIONS, f"activation: one of {tuple(ACTIVATIONS)}, got {self.activation!r}")
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
        """Whether decoder layer `layer` (from 0; MTP layers follow the backbone) routes to experts."""
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
        """The nested released `config.json`, with what its keys cannot say under `text_config.openk3`."""
        return _to_hf(self)

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> K3Config:
        """Reads a released `config.json`, nested or a bare text config. UserError names the key that is wrong."""
        return _from_hf(config)


def _to_hf(c: K3Config) -> dict[str, Any]:
    ids = {"bos_token_id": c.bos_token_id, "eos_token_id": c.eos_token_id, "pad_token_id": c.pad_token_id}
    text: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "num_hidden_layers": c.num_hidden_layers,
        "intermediate_size": c.intermediate_size,
        "hidden_act": ACTIVATIONS[c.activation],
        "rms_norm_eps": c.rms_norm_eps,
        "tie_word_embeddings": c.tie_word_embeddings,
        "max_position_embeddings": c.max_position_embeddings,
        "model_max_length": c.max_position_embeddings,
        "num_nextn_predict_layers": c.num_nextn_predict_layers,
        "initializer_range": c.initializer_range if c.initializer_range is not None else 0.02,
        "use_cache": True,
        "dtype": "bfloat16",
        **ids,
    }
    if c.activation == "situ":
        text |= {"activation_situ_beta": c.situ_beta, "activation_situ_linear_beta": c.situ_linear_beta}
    if c.attnres.kind != "none":
        text["attn_res_block_size"] = c.attnres.block_size
    text |= _attention_keys(c) | _moe_keys(c)
    if extras := _extras(c):
        text["openk3"] = extras
    top = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        **ids,
        "media_placeholder_token_id": c.media_placeholder_token_id,
        "ignore_index": -100,
        "dtype": "bfloat16",
        "tie_word_embeddings": c.tie_word_embeddings,
        "text_config": text,
    }
    if c.vision is not None:
        vision = asdict(c.vision)
        vision["merge_kernel"] = list(c.vision.merge_kernel)
        top["vision_config"] = {_VISION_KEYS[key]: value for key, value in vision.items()} | {
            "mm_hidden_size": c.vision.hidden_size,
            "text_hidden_size": c.hidden_size,
            "pos_emb_type": "divided_fixed",
            "merge_type": "sd2_tpool",
            "mm_projector_type": "patchmergerv2",
        }
    return top


def _attention_keys(c: K3Config) -> dict[str, Any]:
    layers = {
        kind: [i + 1 for i, k in enumerate(c.attn_layers) if (k == "kda") == (kind == "kda_layers")]
        for kind in ("kda_layers", "full_attn_layers")
    }
    keys: dict[str, Any] = {}
    if c.kda is not None:
        keys["linear_attn_config"] = layers | {
            "head_dim": c.kda.head_dim,
            "num_heads": c.kda.num_heads,
            "short_conv_kernel_size": c.kda.conv_size,
            "use_full_rank_gate": c.kda.full_rank_gate,
            "gate_lower_bound": c.kda.lower_bound,
        }
    if c.mla is not None:
        keys |= {
            "num_attention_heads": c.mla.num_heads,
            "num_key_value_heads": c.mla.num_heads,
            "q_lora_rank": c.mla.q_lora_rank,
            "kv_lora_rank": c.mla.kv_lora_rank,
            "qk_nope_head_dim": c.mla.qk_nope_head_dim,
            "qk_rope_head_dim": c.mla.qk_rope_head_dim,
            "v_head_dim": c.mla.v_head_dim,
            "mla_use_nope": c.mla.rope_theta is None,
            "mla_use_output_gate": c.mla.output_gate,
        }
        if c.mla.rope_theta is not None:
            keys["rope_theta"] = c.mla.rope_theta
    return keys


def _moe_keys(c: K3Config) -> dict[str, Any]:
    if c.moe is None:
        return {}
    return {
        "num_experts": c.moe.num_experts,
        "num_experts_per_token": c.moe.top_k,
        "num_shared_experts": c.moe.num_shared_experts,
        "moe_intermediate_size": c.moe.intermediate_size,
        "routed_expert_hidden_size": c.moe.latent_size,
        "latent_moe_use_norm": c.moe.latent_norm,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": c.moe.renormalize,
        "routed_scaling_factor": c.moe.routed_scaling_factor,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": c.first_k_dense,
        "moe_layer_freq": 1,
    }


def _extras(c: K3Config) -> dict[str, Any]:
    """What released keys cannot say. `training` changes no forward pass; anything else does."""
    extras: dict[str, Any] = {}
    if "mha" in c.attn_layers or c.kda is None:
        extras["attn_layers"] = list(c.attn_layers)
    if c.mha is not None:
        extras["mha"] = asdict(c.mha)
    if c.mla is not None and c.mla.latent_norm_eps != 1e-6:
        extras["latent_norm_eps"] = c.mla.latent_norm_eps
    if c.attnres.kind == "full":
        extras["attn_res"] = "full"
    training: dict[str, Any] = {}
    if c.attnres.query != "learned":
        training["attn_res_query"] = c.attnres.query
    if c.initializer_range is None:
        training["initializer"] = "fan_in"
    if c.mtp_loss_weight != 0.3:
        training["mtp_loss_weight"] = c.mtp_loss_weight
    if c.moe is not None:
        default = {f.name: f.default for f in fields(MoEConfig)}
        changed = {
            key: getattr(c.moe, key)
            for key in ("balance", "sign_step", "bins")
            if getattr(c.moe, key) != default[key]
        }
        training |= changed
    if c.attnres.kind == "none" and c.attnres.block_size != AttnResConfig().block_size:
        training["attn_res_block_size"] = c.attnres.block_size
    if training:
        extras["training"] = training
    return extras


class _Keys:
    """Reads keys of one configuration section; a missing or mistyped one is named."""

    def __init__(self, section: str, values: dict[str, Any]):
        self.section, self.values = section, values

    def get(self, key: str, kind: type, default: Any = ...) -> Any:
        value = self.values.get(key, default)
        if value is ...:
            raise UserError(f"config.json: {self.section}.{key} is missing")
        if value is None or (kind is float and isinstance(value, int) and not isinstance(value, bool)):
            return value if value is None else float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise UserError(
                f"config.json: {self.section}.{key} must be {kind.__name__}, got {value!r}"
            )
        return value


def _from_hf(config: dict[str, Any]) -> K3Config:
    text_values = config.get("text_config", config)
    if not isinstance(text_values, dict):
        raise UserError(f"config.json: text_config must be an object, got {text_values!r}")
    text = _Keys("text_config", text_values)
    kind = text.get("model_type", str, "kimi_linear")
    if kind not in ("kimi_linear", "kimi_k3"):
        raise UserError(f"config.json: model_type must be kimi_linear or kimi_k3, got {kind!r}")
    extras = text.get("openk3", dict, {})
    training = extras.get("training", {})
    num_layers = text.get("num_hidden_layers", int)
    linear_values = text.get("linear_attn_config", dict, None)
    kda = _read_kda(_Keys("linear_attn_config", linear_values)) if linear_values else None
    act = text.get("hidden_act", str)
    activation = {released: ours for ours, released in ACTIVATIONS.items()}.get(act)
    if activation is None:
        raise UserError(f"config.json: hidden_act must be situ or silu, got {act!r}")
    block_size = text.get("attn_res_block_size", int, None)
    spread = text.get("initializer_range", float, 0.02)
    return K3Config(
        vocab_size=text.get("vocab_size", int),
        hidden_size=text.get("hidden_size", int),
        intermediate_size=text.get("intermediate_size", int),
        attn_layers=_read_layers(num_layers, linear_values, extras),
        kda=kda,
        mla=_read_mla(text, extras),
        mha=MHAConfig(**extras["mha"]) if "mha" in extras else None,
        moe=_read_moe(text, training),
        attnres=AttnResConfig(
            kind=extras.get("attn_res", "block") if block_size else "none",
            block_size=block_size or training.get("attn_res_block_size", AttnResConfig().block_size),
            query=training.get("attn_res_query", "learned"),
        ),
        first_k_dense=text.get("first_k_dense_replace", int, 1),
        activation=activation,
        situ_beta=text.get("activation_situ_beta", float, 4.0) or 4.0,
        situ_linear_beta=text.get("activation_situ_linear_beta", float, 25.0) or 25.0,
        rms_norm_eps=text.get("rms_norm_eps", float, 1e-6),
        tie_word_embeddings=text.get("tie_word_embeddings", bool, False),
        num_nextn_predict_layers=text.get("num_nextn_predict_layers", int, 0) or 0,
        mtp_loss_weight=training.get("mtp_loss_weight", 0.3),
        max_position_embeddings=text.get("max_position_embeddings", int, None)
        or text.get("model_max_length", int, 1048576),
        initializer_range=None if training.get("initializer") == "fan_in" else spread,
        pad_A_log=kda is not None and (kda.num_heads, kda.head_dim) == (96, 128),
        vision=_read_vision(config.get("vision_config")),
    )


def _read_layers(
    num_layers: int, linear: dict[str, Any] | None, extras: dict[str, Any]
) -> tuple[str, ...]:
    if "attn_layers" in extras:
        layers = tuple(extras["attn_layers"])
        if len(layers) != num_layers:
            raise UserError(
                f"config.json: openk3.attn_layers has {len(layers)} entries, num_hidden_layers is {num_layers}"
            )
        return layers
    if linear is None:
        return ("mla",) * num_layers
    kda_layers = set(linear.get("kda_layers", ()))
    full = set(linear.get("full_attn_layers", ()))
    if kda_layers & full or kda_layers | full != set(range(1, num_layers + 1)):
        raise UserError(
            f"config.json: kda_layers and full_attn_layers must cover 1..{num_layers} once, "
            f"got {len(kda_layers)} and {len(full)} entries"
        )
    return tuple("kda" if layer in kda_layers else "mla" for layer in range(1, num_layers + 1))


def _read_kda(linear: _Keys) -> KDAConfig:
    return KDAConfig(
        num_heads=linear.get("num_heads", int),
        head_dim=linear.get("head_dim", int),
        conv_size=linear.get("short_conv_kernel_size", int, 4),
        lower_bound=linear.get("gate_lower_bound", float, None),
        full_rank_gate=linear.get("use_full_rank_gate", bool, False),
    )


def _read_mla(text: _Keys, extras: dict[str, Any]) -> MLAConfig | None:
    if text.get("kv_lora_rank", int, None) is None:
        return None
    return MLAConfig(
        num_heads=text.get("num_attention_heads", int),
        q_lora_rank=text.get("q_lora_rank", int, None),
        kv_lora_rank=text.get("kv_lora_rank", int),
        qk_nope_head_dim=text.get("qk_nope_head_dim", int),
        qk_rope_head_dim=text.get("qk_rope_head_dim", int),
        v_head_dim=text.get("v_head_dim", int),
        output_gate=text.get("mla_use_output_gate", bool, False),
        latent_norm_eps=extras.get("latent_norm_eps", 1e-6),
        rope_theta=None
        if text.get("mla_use_nope", bool, False)
        else text.get("rope_theta", float, 10000.0),
    )


def _read_moe(text: _Keys, training: dict[str, Any]) -> MoEConfig | None:
    if not text.get("num_experts", int, None):
        return None
    for key, only in (("moe_router_activation_func", "sigmoid"), ("num_expert_group", 1)):
        value = text.values.get(key, only)
        if value != only:
            raise UserError(f"config.json: {key} must be {only!r}, got {value!r}")
    return MoEConfig(
        num_experts=text.get("num_experts", int),
        top_k=text.get("num_experts_per_token", int),
        num_shared_experts=text.get("num_shared_experts", int, 0) or 0,
        intermediate_size=text.get("moe_intermediate_size", int),
        latent_size=text.get("routed_expert_hidden_size", int, None),
        latent_norm=text.get("latent_moe_use_norm", bool, False),
        routed_scaling_factor=text.get("routed_scaling_factor", float, 1.0),
        renormalize=text.get("moe_renormalize", bool, True),
        **{key: training[key] for key in ("balance", "sign_step", "bins") if key in training},
    )


def _read_vision(values: dict[str, Any] | None) -> VisionConfig | None:
    if values is None:
        return None
    found = {ours: values[theirs] for ours, theirs in _VISION_KEYS.items() if theirs in values}
    if "merge_kernel" in found:
        found["merge_kernel"] = tuple(found["merge_kernel"])
    return VisionConfig(**found)
