"""Translates a `K3Config` to the released `config.json` and back."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from k3 import UserError
from k3.model.config import (
    ACTIVATIONS,
    AttnResConfig,
    K3Config,
    KDAConfig,
    MHAConfig,
    MLAConfig,
    MoEConfig,
    VisionConfig,
)

MAX_LAYERS = 10_000

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


def to_hf(c: K3Config) -> dict[str, Any]:
    ids = {
        "bos_token_id": c.bos_token_id,
        "eos_token_id": c.eos_token_id,
        "pad_token_id": c.pad_token_id,
    }
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
        text |= {
            "activation_situ_beta": c.situ_beta,
            "activation_situ_linear_beta": c.situ_linear_beta,
        }
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
        """The value of `key`; null is the same as absent."""
        value = self.values.get(key)
        if value is None:
            if default is ...:
                raise UserError(f"config.json: {self.section}.{key} is missing")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise UserError(
                f"config.json: {self.section}.{key} must be {kind.__name__}, got {value!r}"
            )
        return value

    def section_of(self, key: str) -> _Keys:
        """The object under `key`, empty when absent."""
        return _Keys(f"{self.section}.{key}", self.get(key, dict, {}))


def from_hf(config: dict[str, Any]) -> K3Config:
    text_values = config.get("text_config", config)
    if not isinstance(text_values, dict):
        raise UserError(f"config.json: text_config must be an object, got {text_values!r}")
    text = _Keys("text_config", text_values)
    kind = text.get("model_type", str, "kimi_linear")
    if kind not in ("kimi_linear", "kimi_k3"):
        raise UserError(f"config.json: model_type must be kimi_linear or kimi_k3, got {kind!r}")
    extras = text.section_of("openk3")
    training = extras.section_of("training")
    num_layers = text.get("num_hidden_layers", int)
    if not 0 < num_layers <= MAX_LAYERS:
        raise UserError(f"config.json: num_hidden_layers: 1 to {MAX_LAYERS}, got {num_layers}")
    linear = text.section_of("linear_attn_config")
    kda = _read_kda(linear) if linear.values else None
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
        attn_layers=_read_layers(num_layers, linear, extras),
        kda=kda,
        mla=_read_mla(text, extras),
        mha=_read_mha(extras.section_of("mha")),
        moe=_read_moe(text, training),
        attnres=AttnResConfig(
            kind=extras.get("attn_res", str, "block") if block_size else "none",
            block_size=block_size
            or training.get("attn_res_block_size", int, AttnResConfig().block_size),
            query=training.get("attn_res_query", str, "learned"),
        ),
        first_k_dense=text.get("first_k_dense_replace", int, 1),
        activation=activation,
        situ_beta=text.get("activation_situ_beta", float, 4.0) or 4.0,
        situ_linear_beta=text.get("activation_situ_linear_beta", float, 25.0) or 25.0,
        rms_norm_eps=text.get("rms_norm_eps", float, 1e-6),
        tie_word_embeddings=text.get("tie_word_embeddings", bool, False),
        num_nextn_predict_layers=text.get("num_nextn_predict_layers", int, 0) or 0,
        mtp_loss_weight=training.get("mtp_loss_weight", float, 0.3),
        max_position_embeddings=text.get("max_position_embeddings", int, None)
        or text.get("model_max_length", int, 1048576),
        initializer_range=None if training.get("initializer", str, "") == "fan_in" else spread,
        pad_A_log=kda is not None and (kda.num_heads, kda.head_dim) == (96, 128),
        vision=_read_vision(config.get("vision_config")),
    )


def _read_layers(num_layers: int, linear: _Keys, extras: _Keys) -> tuple[str, ...]:
    if layers := tuple(extras.get("attn_layers", list, [])):
        if len(layers) != num_layers:
            raise UserError(
                f"config.json: openk3.attn_layers has {len(layers)} entries, "
                f"num_hidden_layers is {num_layers}"
            )
        return layers
    if not linear.values:
        return ("mla",) * num_layers
    kda_layers = set(linear.get("kda_layers", list))
    full = set(linear.get("full_attn_layers", list))
    if kda_layers & full or kda_layers | full != set(range(1, num_layers + 1)):
        raise UserError(
            f"config.json: kda_layers and full_attn_layers must cover 1..{num_layers} once, "
            f"got {len(kda_layers)} and {len(full)} entries"
        )
    return tuple("kda" if layer in kda_layers else "mla" for layer in range(1, num_layers + 1))


def _read_mha(mha: _Keys) -> MHAConfig | None:
    if not mha.values:
        return None
    return MHAConfig(
        num_heads=mha.get("num_heads", int),
        head_dim=mha.get("head_dim", int),
        rope_theta=mha.get("rope_theta", float, MHAConfig.rope_theta),
    )


def _read_kda(linear: _Keys) -> KDAConfig:
    return KDAConfig(
        num_heads=linear.get("num_heads", int),
        head_dim=linear.get("head_dim", int),
        conv_size=linear.get("short_conv_kernel_size", int, 4),
        lower_bound=linear.get("gate_lower_bound", float, None),
        full_rank_gate=linear.get("use_full_rank_gate", bool, False),
    )


def _read_mla(text: _Keys, extras: _Keys) -> MLAConfig | None:
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
        latent_norm_eps=extras.get("latent_norm_eps", float, 1e-6),
        rope_theta=None
        if text.get("mla_use_nope", bool, False)
        else text.get("rope_theta", float, 10000.0),
    )


def _read_moe(text: _Keys, training: _Keys) -> MoEConfig | None:
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
        balance=training.get("balance", str, MoEConfig.balance),
        sign_step=training.get("sign_step", float, MoEConfig.sign_step),
        bins=training.get("bins", int, MoEConfig.bins),
    )


def _read_vision(values: dict[str, Any] | None) -> VisionConfig | None:
    if values is None:
        return None
    found = {ours: values[theirs] for ours, theirs in _VISION_KEYS.items() if theirs in values}
    if "merge_kernel" in found:
        found["merge_kernel"] = tuple(found["merge_kernel"])
    return VisionConfig(**found)
