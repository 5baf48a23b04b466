"""A model in the released layout, out and in.

    config.json                             nested, as `K3Config.to_hf` writes it
    generation_config.json
    model-00001-of-000003.safetensors ...   whole layers, in order
    model.safetensors.index.json
    tiktoken.model, tokenizer_config.json   where a tokenizer was given

Source: files and names of the released checkpoint; MXFP4 packing as its `quantization_config`
declares it (compressed-tensors, mxfp4-pack-quantized).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from k3 import UserError
from k3.checkpoint.agreement import check_ids
from k3.checkpoint.folders import remove_leftovers, whole_folder
from k3.checkpoint.layout import (
    DTYPE_NAMES,
    HEAD_PREFIX,
    TensorSpec,
    check_format,
    tensor_specs,
)
from k3.checkpoint.shards import INDEX, Reader, Shards, Stored, read_json
from k3.checkpoint.tensorfile import DTYPES, Entry, write_bytes, write_tensors
from k3.model.config import K3Config
from k3.model.facts import is_fp32_island
from k3.model.transformer import K3
from k3.ops.mx import GROUP, pack_mxfp4, unpack_mxfp4

PACKED_FORMAT = "mxfp4-pack-quantized"
EXPERTS = {"plain": "bf16", "mxfp4": "mxfp4"}
SHARD_BYTES = 5_000_000_000
FLOATS = ("BF16", "F16", "F32")
REPLACED = ("config.json", "generation_config.json", "*.safetensors", INDEX, "tiktoken.model",
            "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")  # fmt: skip
VISION = ("vision_tower.", "mm_projector.")


class SavesItself(Protocol):
    """A tokenizer."""

    vocab_size: int

    def save(self, folder: Path, /) -> None: ...


def save_released(
    model: K3,
    folder: Path | str,
    *,
    tokenizer: SavesItself | None = None,
    dtype: str = "bfloat16",
    experts: str = "plain",
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Writes `model` in the released layout, whole or not at all, and returns the folder.

    An older checkpoint there is replaced when the new one is complete. dtype: bfloat16 or float32;
    fp32 islands stay fp32. experts: "plain", or "mxfp4" to pack routed experts. A shard holds whole
    layers and passes `shard_bytes` only if one layer does. Memory: one tensor at a time. The vision
    tower isn't part of `K3` and isn't written.

    UserError on a width or value that can't be packed, a tokenizer of another vocabulary, a folder
    that holds something else, or a full disk.
    """
    place = Path(os.path.realpath(folder))
    config = model.config.with_(vision=None)
    specs = _specs_to_save(config, experts, dtype)
    if tokenizer is not None and tokenizer.vocab_size != config.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} ids, "
            f"the model's vocab_size is {config.vocab_size}"
        )
    _check_place(place)
    remove_leftovers(place.parent, place.name)
    with whole_folder(place, "what was there is as it was") as temp:
        _write_shards(temp, model, plan_shards(specs, shard_bytes))
        content = _config_json(config, dtype, experts)
        write_bytes(temp / "config.json", _json(content))
        write_bytes(temp / "generation_config.json", _json(_generation(config)))
        if tokenizer is not None:
            tokenizer.save(temp)
        check_ids(temp, config, content)
        for path in temp.iterdir():
            _sync(path)
    return place


def load_config(folder: Path | str) -> K3Config:
    """The configuration of a checkpoint folder. UserError names the file and key."""
    return _config_of(Path(folder))[0]


def load_released(
    folder: Path | str,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    strict: bool = True,
) -> K3:
    """Reads a folder in the released layout, one shard after the other, into a model in evaluation
    mode. The tokenizer's files may be absent.

    Names may lack the `language_model.` prefix (Kimi-Linear's do). Packed experts are dequantised
    and stacked. A_log may be [H], longer with zeros behind, or [1, 1, H, 1]. dtype None is the
    stored one; fp32 islands are fp32 in any case. Tensors of the vision tower are skipped.

    UserError, before any value is read, names the tensor or file and both shapes or values. strict
    also refuses tensors that the model hasn't got, and an index that doesn't add up.
    """
    folder = Path(folder)
    config, content = _config_of(folder)
    check_ids(folder, config, content)
    _check_quantization(folder / "config.json", content)
    shards = Shards(folder, strict)
    parts = _match(shards, config, strict)
    model = K3(config, device="meta", dtype=_wanted_dtype(dtype, shards, parts))
    _fill(model, shards, parts, torch.device(device or "cpu"))
    return model.eval()


def plan_shards(specs: Iterable[TensorSpec], shard_bytes: int) -> list[list[TensorSpec]]:
    """The specs cut into files: decoder layers in order, then what is outside of them. A unit (a
    layer, the embedding, the rest) is never cut, and shares a file while `shard_bytes` allows.
    """
    units: dict[tuple[int, int], list[TensorSpec]] = {}
    for spec in specs:
        units.setdefault(_unit(spec.name), []).append(spec)
    plan: list[list[TensorSpec]] = []
    room = 0
    for _, unit in sorted(units.items()):
        size = sum(spec.nbytes for spec in unit)
        if not plan or size > room:
            plan.append([])
            room = shard_bytes
        plan[-1] += unit
        room -= size
    return plan


def _unit(name: str) -> tuple[int, int]:
    if ".layers." in name:
        return 0, int(name.split(".layers.")[1].split(".")[0])
    return (1, 0) if "embed_tokens" in name else (2, 0)


def _specs_to_save(config: K3Config, experts: str, dtype: str) -> list[TensorSpec]:
    if experts not in EXPERTS:
        raise UserError(f"experts: one of {tuple(EXPERTS)}, got {experts!r}")
    if dtype not in DTYPE_NAMES:
        raise UserError(f"dtype: one of {tuple(DTYPE_NAMES)}, got {dtype!r}")
    return list(tensor_specs(config, EXPERTS[experts], dtype))


def _check_place(place: Path) -> None:
    """Only a checkpoint may be replaced: whatever else is in a folder would be lost."""
    if place.exists() and not place.is_dir():
        raise UserError(f"{place}: is a file, a folder is needed")
    if not place.is_dir():
        return
    for path in sorted(place.iterdir()):
        ours = any(path.match(name) for name in REPLACED) and not path.is_dir()
        if not ours and not path.name.startswith("."):
            raise UserError(
                f"{place}: holds {path.name}, which is no part of a checkpoint; "
                "choose another folder"
            )


def _write_shards(folder: Path, model: K3, plan: list[list[TensorSpec]]) -> None:
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    places: dict[str, str] = {}
    for number, specs in enumerate(plan, start=1):
        file = f"model-{number:05d}-of-{len(plan):06d}.safetensors"
        write_tensors(folder / file, _entries(specs, tensors), {"format": "pt"})
        places |= {spec.name: file for spec in specs}
    total = sum(spec.nbytes for specs in plan for spec in specs)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    write_bytes(folder / INDEX, _json(index))


def _entries(specs: list[TensorSpec], tensors: dict[str, Tensor]) -> Iterator[Entry]:
    pack = _Packer()
    for spec in specs:
        dtype = DTYPES[spec.dtype]

        def value(spec: TensorSpec = spec, dtype: torch.dtype = dtype) -> Tensor:
            source = tensors[spec.source].detach()
            if spec.expert is None:
                return _padded(source, spec.shape).to("cpu", dtype)
            if spec.dtype != "U8":
                return source[spec.expert].to("cpu", dtype)
            return pack(spec, source)[0 if spec.name.endswith("packed") else 1]

        yield Entry(spec.name, spec.shape, dtype, value)


def _padded(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A_log with zeros behind it; every other tensor has its shape already."""
    if tensor.shape == shape or len(shape) != 1:
        return tensor
    return nn.functional.pad(tensor, (0, shape[0] - tensor.shape[0]))


class _Packer:
    """Packs an expert once for its two tensors, which are written one after the other."""

    def __init__(self) -> None:
        self._last: tuple[str, int | None] = ("", None)
        self._pair: tuple[Tensor, ...] = ()

    def __call__(self, spec: TensorSpec, stack: Tensor) -> tuple[Tensor, ...]:
        if self._last != (spec.source, spec.expert):
            assert spec.expert is not None
            try:
                self._pair = pack_mxfp4(stack[spec.expert])
            except ValueError as error:
                raise UserError(f"{spec.source}: expert {spec.expert}: {error}") from None
            self._last = (spec.source, spec.expert)
        return self._pair


def _config_json(config: K3Config, dtype: str, experts: str) -> dict[str, Any]:
    content = config.to_hf()
    content["dtype"] = content["text_config"]["dtype"] = dtype
    if experts == "mxfp4":
        content["text_config"]["quantization_config"] = quantization_config()
    return content


def quantization_config() -> dict[str, Any]:
    """As released. The targets and ignored names are wider than what is packed, there as here:
    routed experts alone.
    """
    weights = {
        "num_bits": 4,
        "type": "float",
        "group_size": GROUP,
        "strategy": "group",
        "symmetric": True,
        "dynamic": False,
        "observer": "minmax",
        "observer_kwargs": {},
        "scale_dtype": "torch.uint8",
        "zp_dtype": None,
        "actorder": None,
        "block_structure": None,
    }
    group = {"targets": ["Linear"], "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": PACKED_FORMAT,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "config_groups": {"group_0": group | {"weights": weights}},
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
    }


def _generation(config: K3Config) -> dict[str, Any]:
    return {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 1.0,
    }


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _config_of(folder: Path) -> tuple[K3Config, dict[str, Any]]:
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    content = read_json(folder / "config.json")
    try:
        return K3Config.from_hf(content), content
    except UserError as error:
        raise UserError(
            f"{folder / 'config.json'}: {error}".replace(": config.json:", ":")
        ) from None
    except (TypeError, AttributeError, KeyError) as error:
        raise UserError(
            f"{folder / 'config.json'}: a value is not of its key's type ({error})"
        ) from None


def _check_quantization(path: Path, content: dict[str, Any]) -> None:
    for section in (content, content.get("text_config")):
        found = section.get("quantization_config") if isinstance(section, dict) else None
        if found is None:
            continue
        kind = found.get("format") if isinstance(found, dict) else found
        if kind != PACKED_FORMAT:
            raise UserError(
                f"{path}: quantization_config.format must be {PACKED_FORMAT!r}, got {kind!r}"
            )


def _wanted_dtype(
    dtype: torch.dtype | str | None, shards: Shards, parts: list[tuple[TensorSpec, str]]
) -> torch.dtype:
    """The one asked for, else the widest that anything but islands and packed experts is in."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype is not None:
        found = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise UserError(f"dtype must name a float type, got {dtype!r}")
        return found
    plain = {shards.tensors[n].dtype for spec, n in parts if not is_fp32_island(spec.source)}
    plain.discard("U8")
    return DTYPES[plain.pop()] if len(plain) == 1 else torch.float32


def _match(shards: Shards, config: K3Config, strict: bool) -> list[tuple[TensorSpec, str]]:
    """Each tensor of the model with the name it is stored under, in the order of the files."""
    names = shards.tensors
    prefixed = any(name.startswith(HEAD_PREFIX) for name in names)
    packed = any(name.endswith(".weight_packed") for name in names)
    experts = "mxfp4" if packed else "bf16"
    try:
        check_format(config, experts)
    except UserError as error:
        raise UserError(f"{shards.folder}: its experts are packed, but {error}") from None
    parts = []
    for spec in tensor_specs(config.with_(vision=None), experts):
        name = spec.name if prefixed else spec.name.removeprefix(HEAD_PREFIX)
        if name not in names:
            shape = list(spec.shape)
            raise UserError(f"{shards.folder}: {name} is missing, the model needs it {shape}")
        _check_stored(shards.folder, name, names[name], spec, config)
        parts.append((spec, name))
    if strict:
        _check_rest(shards, {name for _, name in parts}, config)
    return sorted(parts, key=lambda part: names[part[1]].file)


def _check_stored(
    folder: Path, name: str, found: Stored, spec: TensorSpec, config: K3Config
) -> None:
    where = f"{folder / found.file}: {name}"
    allowed = ("U8",) if spec.dtype == "U8" else FLOATS
    if found.dtype not in allowed:
        raise UserError(f"{where} has dtype {found.dtype}, it must be {' or '.join(allowed)}")
    if spec.name.endswith("A_log"):
        fits = _holds_heads(found.shape, config)
    else:
        fits = found.shape == spec.shape
    if not fits:
        raise UserError(f"{where} has shape {list(found.shape)}, the model has {list(spec.shape)}")


def _holds_heads(shape: tuple[int, ...], config: K3Config) -> bool:
    """[H] or longer, or Kimi-Linear's [1, 1, H, 1]; of a padded layout the heads are enough."""
    assert config.kda is not None
    flat = len(shape) == 1 or (len(shape) == 4 and (shape[0], shape[1], shape[3]) == (1, 1, 1))
    return flat and max(shape) >= config.kda.num_heads


def _check_rest(shards: Shards, wanted: set[str], config: K3Config) -> None:
    for name, found in shards.tensors.items():
        if name not in wanted and not name.startswith(VISION):
            tied = ", tie_word_embeddings is true" if config.tie_word_embeddings else ""
            raise UserError(
                f"{shards.folder / found.file}: {name} {list(found.shape)} is no tensor of this "
                f"model ({config.num_hidden_layers} layers, "
                f"{config.num_nextn_predict_layers} for MTP{tied})"
            )


def _fill(
    model: K3, shards: Shards, parts: list[tuple[TensorSpec, str]], device: torch.device
) -> None:
    """Reads the tensors in file order and puts each where it belongs."""
    made: dict[str, Tensor] = {}
    empty = dict([*model.named_parameters(), *model.named_buffers()])
    scales = {(s.source, s.expert): n for s, n in parts if n.endswith(".weight_scale")}
    with shards.reading() as reader, torch.no_grad():
        for spec, name in parts:
            if name.endswith(".weight_scale"):
                continue
            if spec.source not in made:
                like = empty[spec.source]
                made[spec.source] = torch.empty(like.shape, dtype=like.dtype, device=device)
            target = made[spec.source]
            scale = scales.get((spec.source, spec.expert))
            _copy(target if spec.expert is None else target[spec.expert], reader, name, scale)
    for name, tensor in made.items():
        _put(model, name, tensor)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])


def _copy(target: Tensor, reader: Reader, name: str, scale_name: str | None) -> None:
    if scale_name is not None:
        packed = reader.get(name).to(target.device)
        scale = reader.get(scale_name).to(target.device)
        target.copy_(unpack_mxfp4(packed, scale, target.dtype))
        return
    value = reader.get(name)
    if name.endswith("A_log"):
        value = value.flatten()
        if bool(value[target.numel() :].any()):
            count = value.numel()
            raise UserError(f"{name}: has {count} values, not 0 past the {target.numel()} heads")
        value = value[: target.numel()]
    target.copy_(value)


def _put(model: K3, name: str, tensor: Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    old = getattr(module, leaf)
    if isinstance(old, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=old.requires_grad)
    setattr(module, leaf, tensor)
    assert is_fp32_island(name) <= (tensor.dtype == torch.float32)
