"""Every tensor of a model's released checkpoint, from its configuration alone: name, shape, dtype.

Two namings meet here. Ours is that of `K3` (`layers.3.block_sparse_moe.experts.w1`, all experts in
one tensor); the released one is `language_model.model.` before it, one tensor for each expert, and
MTP layers numbered on after the backbone's. Source: index and configuration of the released
checkpoint, whose byte count the shapes below reproduce.

Legend: D hidden, H heads, K key width, V value width, E experts, l latent, m expert width.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from k3 import UserError
from k3.model.config import K3Config, KDAConfig, MHAConfig, MLAConfig, MoEConfig, VisionConfig
from k3.model.facts import is_fp32_island
from k3.ops.mx import GROUP

Shape = tuple[int, ...]
Named = Iterator[tuple[str, Shape]]

PREFIX, HEAD_PREFIX = "language_model.model.", "language_model."
EXPERT_LEAVES = ("w1", "w2", "w3")
NUMBERED = re.compile(r"(?<=\.)(layers|experts|blocks)\.\d+")
LETTERS = {"layers": "layers.{L}", "experts": "experts.{E}", "blocks": "blocks.{B}"}
FORMATS = ("bf16", "mxfp4")
BYTES = {"F32": 4, "BF16": 2, "U8": 1}
DTYPE_NAMES = {"bfloat16": "BF16", "float32": "F32"}


class TensorSpec(NamedTuple):
    name: str
    """As released."""
    shape: Shape
    dtype: str
    """As safetensors spells it: BF16, F32, U8."""
    source: str
    """The tensor of `K3` it belongs to; empty for the vision tower and its projector."""
    expert: int | None = None
    """Which row of a stacked `source` it is."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * BYTES[self.dtype]


@dataclass(frozen=True)
class Group:
    """Tensors that differ only in their layer {L}, expert {E} or vision block {B}."""

    pattern: str
    count: int
    shape: Shape
    dtype: str
    nbytes: int


def tensor_specs(
    config: K3Config, experts: str = "bf16", dtype: str = "bfloat16"
) -> Iterator[TensorSpec]:
    """Every released tensor of `config`, layer by layer.

    experts: "bf16" stores routed experts like all else, "mxfp4" packed. dtype: bfloat16 or float32,
    of all that isn't packed or an fp32 island. UserError on a width that can't be packed.
    """
    check_format(config, experts)
    plain = DTYPE_NAMES[dtype]
    for name, shape in model_shapes(config):
        if ".experts." in name:
            yield from _expert_specs(name, shape, experts, plain, config)
        else:
            kind = "F32" if is_fp32_island(name) else plain
            stored = released_shape(name, shape, config)
            yield TensorSpec(released_name(name, config), stored, kind, name)
    if config.vision is not None:
        for name, shape in vision_shapes(config.vision, config.hidden_size):
            yield TensorSpec(name, shape, plain, "")


def check_format(config: K3Config, experts: str) -> None:
    """UserError if routed experts can't be stored this way."""
    if experts not in FORMATS:
        raise UserError(f"experts: one of {FORMATS}, got {experts!r}")
    if experts == "bf16":
        return
    moe = config.moe
    if moe is None:
        raise UserError("experts mxfp4: the model has no routed experts to pack")
    for name, width in (
        ("moe.intermediate_size", moe.intermediate_size),
        ("the experts' input width", moe.latent_size or config.hidden_size),
    ):
        if width % GROUP:
            raise UserError(f"experts mxfp4: {name} must be a multiple of {GROUP}, got {width}")


def grouped(specs: Iterable[TensorSpec]) -> list[Group]:
    """The specs by pattern, shape and dtype, in name order."""
    counts: dict[tuple[str, Shape, str], int] = {}
    for spec in specs:
        key = (pattern(spec.name), spec.shape, spec.dtype)
        counts[key] = counts.get(key, 0) + 1
    return [
        Group(name, count, shape, dtype, count * prod(shape) * BYTES[dtype])
        for (name, shape, dtype), count in sorted(counts.items())
    ]


def pattern(name: str) -> str:
    """A released name with {L}, {E} and {B} for its numbers."""
    return NUMBERED.sub(lambda match: LETTERS[match[1]], name)


def layout_rows(config: K3Config, experts: str = "bf16") -> list[dict[str, Any]]:
    """`grouped` as rows for a table of 100 columns: tensor, count, shape, dtype, size.

    The last row is the sum. `~` stands for the prefix of the text network.
    """
    groups = grouped(tensor_specs(config, experts))
    count, total = sum(g.count for g in groups), sum(g.nbytes for g in groups)
    rows: list[dict[str, Any]] = [
        {
            "tensor": group.pattern.replace(PREFIX + "layers.{L}.", "~"),
            "count": group.count,
            "shape": "x".join(map(str, group.shape)),
            "dtype": group.dtype,
            "size": _size(group.nbytes),
        }
        for group in groups
    ]
    name = f"total, {total:,} bytes"
    last = {"tensor": name, "count": count, "shape": "", "dtype": "", "size": _size(total)}
    return [*rows, last]


def _size(nbytes: int) -> str:
    """Bytes in powers of ten."""
    for bound, unit in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if nbytes >= bound:
            return f"{nbytes / bound:.4g} {unit}"
    return f"{nbytes} B"


def released_name(name: str, config: K3Config) -> str:
    """The released name of a tensor of `K3` that isn't a stack of experts."""
    if name == "lm_head.weight":
        return HEAD_PREFIX + name
    if name.startswith("mtp."):
        _, index, rest = name.split(".", 2)
        return f"{PREFIX}layers.{config.num_hidden_layers + int(index)}.{rest}"
    return PREFIX + name


def released_shape(name: str, shape: Shape, config: K3Config) -> Shape:
    """K3's checkpoint keeps A_log zero-padded to the head width; all else as it is."""
    if name.endswith("A_log") and config.pad_A_log:
        assert config.kda is not None
        return (max(shape[0], config.kda.head_dim),)
    return shape


def _expert_specs(
    name: str, shape: Shape, experts: str, plain: str, config: K3Config
) -> Iterator[TensorSpec]:
    count, rows, columns = shape
    stem, _, leaf = released_name(name, config).rpartition(".")
    for e in range(count):
        full = f"{stem}.{e}.{leaf}"
        if experts == "bf16":
            yield TensorSpec(f"{full}.weight", (rows, columns), plain, name, e)
        else:
            yield TensorSpec(f"{full}.weight_packed", (rows, columns // 2), "U8", name, e)
            yield TensorSpec(f"{full}.weight_scale", (rows, columns // GROUP), "U8", name, e)


def model_shapes(config: K3Config) -> Named:
    """Name and shape of every parameter and buffer of `K3(config)`, made without the model."""
    D, count = config.hidden_size, config.num_hidden_layers
    yield "embed_tokens.weight", (config.vocab_size, D)
    for layer in range(count):
        for name, shape in _layer(config, layer):
            yield f"layers.{layer}.{name}", shape
    for index in range(config.num_nextn_predict_layers):
        for name, shape in _mtp(config):
            yield f"mtp.{index}.{name}", shape
    yield "norm.weight", (D,)
    yield from _query("output_attn_res", config)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, D)


def _layer(config: K3Config, layer: int) -> Named:
    yield "input_layernorm.weight", (config.hidden_size,)
    yield from _query("self_attention_res", config)
    yield from _under("self_attn", attention_shapes(config, config.attn_layers[layer]))
    yield "post_attention_layernorm.weight", (config.hidden_size,)
    yield from _query("mlp_res", config)
    yield from _feed_forward(config, config.is_moe(layer))


def _mtp(config: K3Config) -> Named:
    D = config.hidden_size
    yield "enorm.weight", (D,)
    yield "hnorm.weight", (D,)
    yield "eh_proj.weight", (D, 2 * D)
    yield "input_layernorm.weight", (D,)
    yield from _under("self_attn", attention_shapes(config, "mla"))
    yield "post_attention_layernorm.weight", (D,)
    yield from _feed_forward(config, config.moe is not None)
    yield "shared_head.norm.weight", (D,)


def _feed_forward(config: K3Config, routed: bool) -> Named:
    D = config.hidden_size
    if routed:
        assert config.moe is not None
        yield from _under("block_sparse_moe", _moe(config.moe, D))
    else:
        yield from _under("mlp", _glu(D, config.intermediate_size))


def _query(name: str, config: K3Config) -> Named:
    if config.attnres.kind != "none":
        yield f"{name}_norm.weight", (config.hidden_size,)
        yield f"{name}_proj.weight", (1, config.hidden_size)


def attention_shapes(config: K3Config, kind: str) -> Named:
    """Name (within `self_attn`) and shape of each weight of one attention layer."""
    if kind == "kda":
        assert config.kda is not None
        return _kda(config.kda, config.hidden_size)
    if kind == "mla":
        assert config.mla is not None
        return _mla(config.mla, config.hidden_size)
    assert config.mha is not None
    return _mha(config.mha, config.hidden_size)


def _kda(c: KDAConfig, D: int) -> Named:
    for name in ("q", "k", "v"):
        yield f"{name}_proj.weight", (c.width, D)
        yield f"{name}_conv1d.weight", (c.width, 1, c.conv_size)
    yield "f_a_proj.weight", (c.head_dim, D)
    yield "f_b_proj.weight", (c.width, c.head_dim)
    yield "A_log", (c.num_heads,)
    yield "dt_bias", (c.width,)
    yield "b_proj.weight", (c.num_heads, D)
    if c.full_rank_gate:
        yield "g_proj.weight", (c.width, D)
    else:
        yield "g_a_proj.weight", (c.head_dim, D)
        yield "g_b_proj.weight", (c.width, c.head_dim)
    yield "o_norm.weight", (c.head_dim,)
    yield "o_proj.weight", (D, c.width)


def _mla(c: MLAConfig, D: int) -> Named:
    queries = c.num_heads * c.qk_head_dim
    values = c.num_heads * c.v_head_dim
    if c.q_lora_rank is None:
        yield "q_proj.weight", (queries, D)
    else:
        yield "q_a_proj.weight", (c.q_lora_rank, D)
        yield "q_a_layernorm.weight", (c.q_lora_rank,)
        yield "q_b_proj.weight", (queries, c.q_lora_rank)
    yield "kv_a_proj_with_mqa.weight", (c.row_width, D)
    yield "kv_a_layernorm.weight", (c.kv_lora_rank,)
    yield "kv_b_proj.weight", (c.num_heads * c.qk_nope_head_dim + values, c.kv_lora_rank)
    if c.output_gate:
        yield "g_proj.weight", (values, D)
    yield "o_proj.weight", (D, values)


def _mha(c: MHAConfig, D: int) -> Named:
    for name in ("q", "k", "v"):
        yield f"{name}_proj.weight", (c.width, D)
    yield "o_proj.weight", (D, c.width)


def _moe(c: MoEConfig, D: int) -> Named:
    l, m = c.latent_size or D, c.intermediate_size
    yield "gate.weight", (c.num_experts, D)
    yield "gate.e_score_correction_bias", (c.num_experts,)
    if c.latent_size is not None:
        yield "routed_expert_down_proj.weight", (l, D)
        if c.latent_norm:
            yield "routed_expert_norm.weight", (l,)
        yield "routed_expert_up_proj.weight", (D, l)
    if c.num_shared_experts:
        yield from _under("shared_experts", _glu(D, c.num_shared_experts * m))
    yield "experts.w1", (c.num_experts, m, l)
    yield "experts.w2", (c.num_experts, l, m)
    yield "experts.w3", (c.num_experts, m, l)


def _glu(D: int, width: int) -> Named:
    yield "gate_proj.weight", (width, D)
    yield "up_proj.weight", (width, D)
    yield "down_proj.weight", (D, width)


def _under(name: str, inner: Iterable[tuple[str, Shape]]) -> Named:
    for leaf, shape in inner:
        yield f"{name}.{leaf}", shape


def vision_shapes(c: VisionConfig, text_width: int) -> Named:
    """MoonViT-V2 and the projector into the text width, by their released names."""
    W, tower, block = c.hidden_size, "vision_tower.", "vision_tower.encoder.blocks."
    merged = W * prod(c.merge_kernel)
    yield f"{tower}patch_embed.proj.weight", (W, 3, c.patch_size, c.patch_size)
    yield f"{tower}patch_embed.pos_emb.weight", (c.init_pos_emb_height, c.init_pos_emb_width, W)
    for b in range(c.num_layers):
        yield f"{block}{b}.norm0.weight", (W,)
        yield f"{block}{b}.norm1.weight", (W,)
        yield f"{block}{b}.wqkv.weight", (3 * c.qkv_hidden_size, W)
        yield f"{block}{b}.wo.weight", (W, c.qkv_hidden_size)
        yield f"{block}{b}.mlp.fc0.weight", (c.intermediate_size, W)
        yield f"{block}{b}.mlp.fc1.weight", (W, c.intermediate_size)
    yield f"{tower}encoder.final_layernorm.weight", (W,)
    yield "mm_projector.proj.0.weight", (merged, merged)
    yield "mm_projector.proj.2.weight", (text_width, merged)
    yield "mm_projector.post_norm.weight", (text_width,)
