"""The layout from a configuration alone: the released checkpoint's, and every model's own names."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_models import ALL

from k3 import UserError
from k3.checkpoint.layout import grouped, layout_rows, model_shapes, pattern, tensor_specs
from k3.model.config import K3Config
from k3.model.facts import is_fp32_island
from k3.model.presets import preset
from k3.model.transformer import K3

RELEASED = json.loads((Path(__file__).parent / "released_layout.json").read_text())


@pytest.fixture(scope="module")
def released():
    return list(tensor_specs(preset("kimi-k3"), "mxfp4"))


def test_kimi_k3_is_the_released_checkpoint(released):
    groups = grouped(released)
    found = {group.pattern: [group.count, list(group.shape), group.dtype] for group in groups}
    assert found == RELEASED["patterns"] and len(groups) == 60
    assert sum(group.nbytes for group in groups) == RELEASED["total_size"] == 1_560_860_324_864
    assert len({spec.name for spec in released}) == RELEASED["n_tensors"] == 497_220


@pytest.mark.parametrize(
    "wrong",
    [
        {"pad_A_log": False},
        {"vision": None},
        {"num_nextn_predict_layers": 1},
        {"tie_word_embeddings": True},
        {"attnres__kind": "none"},
        {"mla__output_gate": False},
        {"kda__full_rank_gate": False},
        {"moe__latent_norm": False},
        {"moe__num_shared_experts": 1},
    ],
)
def test_another_shape_is_not_the_released_one(wrong):
    few = preset("kimi-k3", moe__num_experts=16)
    right, found = grouped(tensor_specs(few)), grouped(tensor_specs(few.with_(**wrong)))
    assert found != right
    assert sum(group.nbytes for group in found) != sum(group.nbytes for group in right)


@pytest.mark.parametrize("name", ALL)
def test_names_and_shapes_are_the_models_own(name: str):
    model = K3(ALL[name], device="meta")
    tensors = [*model.named_parameters(), *model.named_buffers()]
    shapes = list(model_shapes(ALL[name]))
    assert dict(shapes) == {n: tuple(t.shape) for n, t in tensors}
    assert len(shapes) == len(dict(shapes))


@pytest.mark.parametrize("name", ALL)
def test_dtypes_are_the_models_own(name: str):
    model = K3(ALL[name], device="meta", dtype=torch.bfloat16)
    dtypes = {n: t.dtype for n, t in [*model.named_parameters(), *model.named_buffers()]}
    names = {torch.float32: "F32", torch.bfloat16: "BF16"}
    for spec in tensor_specs(ALL[name]):
        if spec.source and spec.expert in (None, 0):
            assert spec.dtype == names[dtypes[spec.source]], spec


@pytest.mark.parametrize("experts", ["bf16", "mxfp4"])
@pytest.mark.parametrize("name", [n for n in ALL if n not in ("kimi-k3", "kimi-linear", "small")])
def test_released_names_are_one_to_one(name: str, experts: str):
    config = ALL[name]
    if experts == "mxfp4" and (config.moe is None or config.moe.intermediate_size % 32):
        pytest.skip("nothing to pack")
    if experts == "mxfp4" and (config.moe.latent_size or config.hidden_size) % 32:
        pytest.skip("too narrow to pack")
    specs = list(tensor_specs(config, experts))
    assert len({spec.name for spec in specs}) == len(specs)
    parts = {(s.source, s.expert, s.name.rpartition("_")[2]) for s in specs if s.expert is not None}
    assert len(parts) == sum(spec.expert is not None for spec in specs)
    assert {spec.source for spec in specs} == {name for name, _ in model_shapes(config)}


def test_what_float32_and_islands_change():
    nano = preset("nano")
    assert {spec.dtype for spec in tensor_specs(nano, dtype="float32")} == {"F32"}
    islands = {spec.name for spec in tensor_specs(nano) if spec.dtype == "F32"}
    assert islands == {spec.name for spec in tensor_specs(nano) if is_fp32_island(spec.name)}
    # Four KDA layers: decay, its bias, three convolutions, head norm; five routers with MTP's.
    assert len(islands) == nano.attn_layers.count("kda") * 6 + 5


def test_mtp_layers_are_numbered_on():
    names = {spec.name for spec in tensor_specs(preset("nano"))}
    assert "language_model.model.layers.5.eh_proj.weight" in names
    assert "language_model.model.layers.5.shared_head.norm.weight" in names
    assert not any("mtp" in name for name in names)


def test_patterns():
    name = "language_model.model.layers.12.block_sparse_moe.experts.895.w1.weight_scale"
    assert pattern(name) == (
        "language_model.model.layers.{L}.block_sparse_moe.experts.{E}.w1.weight_scale"
    )
    assert pattern("vision_tower.encoder.blocks.3.mlp.fc0.weight").count("{B}") == 1


def test_same_name_with_two_shapes_is_two_groups():
    groups = grouped(tensor_specs(preset("kimi-linear")))
    found = {g.shape: g.count for g in groups if g.pattern.endswith("self_attn.q_proj.weight")}
    assert found == {(4096, 2304): 20, (6144, 2304): 7}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (preset("nano", moe__intermediate_size=40), "moe.intermediate_size .* 32, got 40"),
        (preset("nano", moe__latent_size=None), "input width .* 32, got 112"),
        (preset("plain"), "no routed experts"),
    ],
)
def test_what_cannot_be_packed_is_said(config: K3Config, words: str):
    with pytest.raises(UserError, match=words):
        list(tensor_specs(config, "mxfp4"))


def test_unknown_format():
    with pytest.raises(UserError, match="nvfp4"):
        list(tensor_specs(preset("nano"), "nvfp4"))


def test_rows_fit_a_table():
    rows = layout_rows(preset("kimi-k3"), "mxfp4")
    assert len(rows) == 61 and rows[-1]["tensor"] == "total, 1,560,860,324,864 bytes"
    cells = [[f"{v:,}" if isinstance(v, int) else v for v in row.values()] for row in rows]
    assert sum(max(map(len, column)) for column in zip(*cells, strict=True)) + 4 * 2 <= 100
    small = replace(preset("nano"), vision=preset("kimi-k3").vision)
    assert layout_rows(small)[-1]["count"] == len(list(tensor_specs(small)))
