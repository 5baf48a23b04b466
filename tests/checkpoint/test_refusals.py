"""What is wrong with a folder is said in one line: tensor or file, and both shapes or values."""

import os
from pathlib import Path

import pytest
import torch
from checkpoint_models import INDEX, LM, edit, logits, rewrite

from k3 import UserError
from k3.checkpoint.released import load_released, save_released
from k3.model.transformer import K3

GATE = f"{LM}layers.1.block_sparse_moe.gate.weight"
EXPERT = f"{LM}layers.1.block_sparse_moe.experts.7.w3.weight"
BAD_TENSORS = {
    "missing": (lambda t: t.pop(GATE), r"gate.weight is missing.*\[8, 64\]"),
    "expert missing": (lambda t: t.pop(EXPERT), r"experts.7.w3.weight is missing"),
    "extra": (lambda t: t.update({LM + "x.weight": torch.ones(3)}), r"x.weight \[3\] is no tensor"),
    "transposed": (
        lambda t: t.update({GATE: t[GATE].T.contiguous()}),
        r"gate.weight has shape \[64, 8\], the model has \[8, 64\]",
    ),
    "expert misshapen": (
        lambda t: t.update({EXPERT: t[EXPERT][:31].clone()}),
        r"shape \[31, 64\], the model has \[32, 64\]",
    ),
    "integers": (lambda t: t.update({GATE: t[GATE].to(torch.int8)}), r"gate.weight has dtype I8"),
    "doubles": (lambda t: t.update({GATE: t[GATE].double()}), r"gate.weight has dtype F64"),
    "short decay": (
        lambda t: t.update({f"{LM}layers.0.self_attn.A_log": torch.zeros(1)}),
        r"A_log has shape \[1\], the model has \[2\]",
    ),
    "wide decay": (
        lambda t: t.update({f"{LM}layers.0.self_attn.A_log": torch.zeros(1, 2, 2, 1)}),
        r"A_log has shape \[1, 2, 2, 1\]",
    ),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_wrong_tensors_are_named(folder: Path, name: str):
    change, words = BAD_TENSORS[name]
    rewrite(folder, lambda t: (change(t), t)[1])
    with pytest.raises(UserError, match=words) as caught:
        load_released(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_strict_is_about_what_is_too_much(folder: Path, model: K3):
    rewrite(folder, lambda t: t | {LM + "x.weight": torch.ones(3)})
    assert torch.equal(logits(load_released(folder, strict=False)), logits(model))


def test_packed_bytes_of_another_type(model: K3, tmp_path: Path):
    folder = save_released(model, tmp_path / "hf", experts="mxfp4")
    rewrite(folder, lambda t: t | {n: v.char() for n, v in t.items() if n.endswith("scale")})
    with pytest.raises(UserError, match="weight_scale has dtype I8, it must be U8"):
        load_released(folder)


FILE = "model-00002-of-"
BAD_FILES = {
    "shard missing": (lambda f: next(f.glob(FILE + "*")).unlink(), FILE + ".*: missing, the index"),
    "shard truncated": (
        lambda f: os.truncate(next(f.glob(FILE + "*")), 50_000),
        FILE + ".*: truncated, 50000 bytes, its header says",
    ),
    "header truncated": (lambda f: os.truncate(next(f.glob(FILE + "*")), 50), FILE + ".*truncated"),
    "empty shard": (lambda f: os.truncate(next(f.glob(FILE + "*")), 0), FILE + ".*truncated"),
    "no header": (lambda f: next(f.glob(FILE + "*")).write_bytes(b"\2" + bytes(30)), FILE),
    "no index": (lambda f: (f / INDEX).unlink(), "has neither"),
    "total": (
        lambda f: edit(f / INDEX, lambda c: c["metadata"].update(total_size=5)),
        "total_size is 5, its tensors have",
    ),
    "no map": (lambda f: edit(f / INDEX, lambda c: c.pop("weight_map")), "weight_map"),
    "not in shard": (
        lambda f: edit(
            f / INDEX,
            lambda c: c["weight_map"].update({LM + "norm.weight": c["weight_map"][GATE]}),
        ),
        "has no .*norm.weight, the index places it there",
    ),
    "not in index": (
        lambda f: edit(f / INDEX, lambda c: c["weight_map"].pop(GATE)),
        "holds .*gate.weight, the index doesn't name it",
    ),
    "outside": (
        lambda f: edit(f / INDEX, lambda c: c["weight_map"].update({GATE: "../x.safetensors"})),
        "file of this folder",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: missing"),
    "config cut": (lambda f: os.truncate(f / "config.json", 40), "config.json: cannot be read"),
    "config a list": (lambda f: (f / "config.json").write_text("[]"), "must be a JSON object"),
    "config key": (
        lambda f: edit(f / "config.json", lambda c: c["text_config"].pop("vocab_size")),
        "config.json: text_config.vocab_size is missing",
    ),
    "eos": (
        lambda f: edit(f / "config.json", lambda c: c["text_config"].update(eos_token_id=65)),
        "text_config.eos_token_id is 65, .*: eos_token_id is 66",
    ),
    "media": (
        lambda f: (
            edit(f / "config.json", lambda c: c.update(media_placeholder_token_id=3)),
            (f / "tokenizer_config.json").write_text("{}"),
        ),
        "media_placeholder_token_id is 3, in a vocabulary of 320 it must be 85",
    ),
    "generation": (
        lambda f: edit(f / "generation_config.json", lambda c: c.update(eos_token_id=[2, 3])),
        r"generation_config.json: eos_token_id is \[2, 3\]",
    ),
    "value of no such type": (
        lambda f: edit(f / "config.json", lambda c: c["text_config"].update(hidden_size=None)),
        "config.json: text_config.hidden_size is missing",
    ),
    "openk3": (
        lambda f: edit(f / "config.json", lambda c: c["text_config"].update(openk3={"mha": 3})),
        "config.json: text_config.openk3.mha must be dict, got 3",
    ),
    "other packing": (
        lambda f: edit(
            f / "config.json",
            lambda c: c["text_config"].update(quantization_config={"format": "nvfp4"}),
        ),
        "quantization_config.format must be 'mxfp4-pack-quantized', got 'nvfp4'",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_wrong_files_are_named(folder: Path, name: str):
    change, words = BAD_FILES[name]
    change(folder)
    with pytest.raises(UserError, match=words) as caught:
        load_released(folder)
    line = str(caught.value)
    assert "\n" not in line and str(folder) in line and line.count(" config.json:") <= 1


def test_packed_experts_of_a_width_that_cannot_be(model: K3, tmp_path: Path):
    folder = save_released(model, tmp_path / "hf", experts="mxfp4")
    edit(folder / "config.json", lambda c: c["text_config"].update(moe_intermediate_size=40))
    with pytest.raises(UserError, match=r"hf: its experts are packed, but .* 32, got 40"):
        load_released(folder)


def test_no_folder(tmp_path: Path):
    with pytest.raises(UserError, match="no such folder"):
        load_released(tmp_path / "none")
