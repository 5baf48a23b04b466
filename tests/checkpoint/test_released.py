"""The released layout out and in: the same model comes back, and only the same model."""

import base64
import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_models import IDS, INDEX, LM, ODD, SMALL, edit, logits, made, rewrite, tensors_of
from safetensors.torch import load_file, save_file

from k3 import UserError
from k3.checkpoint import tensorfile
from k3.checkpoint.export import export_check, require_exportable
from k3.checkpoint.layout import grouped, released_name, tensor_specs
from k3.checkpoint.logits import inspect_logits
from k3.checkpoint.released import load_config, load_released, plan_shards, save_released
from k3.checkpoint.shards import Shards
from k3.model.config import K3Config
from k3.model.facts import is_fp32_island
from k3.model.generate import generate
from k3.model.presets import preset
from k3.model.transformer import K3
from k3.ops.mx import unpack_mxfp4
from k3.ops.spans import Spans


def small(name: str) -> K3Config:
    return ODD[name].with_(vocab_size=320) if name != "depth 7" else ODD["one shared expert"]


@pytest.mark.parametrize("name", ODD)
def test_float32_comes_back_exactly(name: str, tmp_path: Path):
    before = made(small(name))
    save_released(before, tmp_path / "hf", dtype="float32")
    after = load_released(tmp_path / "hf")
    assert after.config == before.config and not after.training
    for key, tensor in tensors_of(before).items():
        assert torch.equal(tensors_of(after)[key], tensor), key
    assert torch.equal(logits(before), logits(after))
    frozen = {n for n, p in before.named_parameters() if not p.requires_grad}
    assert frozen == {n for n, p in after.named_parameters() if not p.requires_grad}


def test_generation_goes_on_alike(model: K3, folder: Path):
    loaded = load_released(folder)
    for temperature in (0.0, 1.0):
        arguments = {"max_new_tokens": 12, "temperature": temperature, "seed": 3}
        prompts = [[5, 6, 7], [9]]
        assert generate(model, prompts, **arguments) == generate(loaded, prompts, **arguments)


def test_bfloat16_comes_back_rounded_and_islands_do_not(model: K3, tmp_path: Path):
    save_released(model, tmp_path / "hf")
    loaded = load_released(tmp_path / "hf")
    for name, tensor in tensors_of(model).items():
        found = tensors_of(loaded)[name]
        if is_fp32_island(name):
            assert found.dtype == torch.float32 and torch.equal(found, tensor), name
        else:
            assert found.dtype == torch.bfloat16 and torch.equal(found, tensor.bfloat16()), name
    wide = load_released(tmp_path / "hf", dtype=torch.float32)
    assert wide.norm.weight.dtype == torch.float32
    with torch.no_grad():
        spans = Spans.from_lengths([len(IDS)])
        out = model(IDS, spans)
        near = wide(IDS, spans, routes=out.routes)
        error = (wide.logits(near.h_TD) - model.logits(out.h_TD)).norm()
        assert 0 < error / model.logits(out.h_TD).norm() < 0.05
    # What was rounded once stays as it is.
    save_released(loaded, tmp_path / "again")
    for file in sorted((tmp_path / "hf").iterdir()):
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


def test_mxfp4_is_packed_once_and_stays(model: K3, tmp_path: Path):
    save_released(model, tmp_path / "hf", experts="mxfp4")
    loaded = load_released(tmp_path / "hf")
    stored = load_file(next((tmp_path / "hf").glob("*.safetensors")))
    stem = f"{LM}layers.2.block_sparse_moe.experts.3.w2"
    packed, scale = stored[f"{stem}.weight_packed"], stored[f"{stem}.weight_scale"]
    assert packed.dtype == scale.dtype == torch.uint8
    assert packed.shape == (64, 16) and scale.shape == (64, 1)
    found = loaded.layers[2].block_sparse_moe.experts.w2[3]
    assert torch.equal(found, unpack_mxfp4(packed, scale, torch.bfloat16))
    exact = model.layers[2].block_sparse_moe.experts.w2[3]
    assert 0.01 < (found - exact).norm() / exact.norm() < 0.2
    # Packing again finds the same scales and values (-0 may come back as 0).
    save_released(loaded, tmp_path / "again", experts="mxfp4")
    again = load_file(next((tmp_path / "again").glob("*.safetensors")))
    assert all(torch.equal(again[n], t) for n, t in stored.items() if not n.endswith("packed"))
    for name, tensor in tensors_of(load_released(tmp_path / "again")).items():
        assert torch.equal(tensor, tensors_of(loaded)[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("experts", ["plain", "mxfp4"])
def test_on_a_gpu_as_on_the_cpu(model: K3, tmp_path: Path, experts: str):
    save_released(model, tmp_path / "cpu", experts=experts)
    loaded = load_released(tmp_path / "cpu", device="cuda")
    expected = tensors_of(load_released(tmp_path / "cpu"))
    for name, tensor in tensors_of(loaded).items():
        assert tensor.is_cuda and torch.equal(tensor.cpu(), expected[name]), name
    save_released(loaded, tmp_path / "gpu", experts=experts)
    again = tensors_of(load_released(tmp_path / "gpu"))
    assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("experts", ["plain", "mxfp4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_files_hold_what_the_layout_says(model: K3, tmp_path: Path, experts: str, dtype: str):
    folder = save_released(model, tmp_path / "hf", dtype=dtype, experts=experts)
    kind = "bf16" if experts == "plain" else experts
    expected = {s.name: (s.shape, s.dtype) for s in tensor_specs(SMALL, kind, dtype)}
    shards = Shards(folder)
    assert {n: (s.shape, s.dtype) for n, s in shards.tensors.items()} == expected
    index = json.loads((folder / INDEX).read_text())
    sizes = sum(group.nbytes for group in grouped(tensor_specs(SMALL, kind, dtype)))
    assert index["metadata"]["total_size"] == sizes
    read = {n: t for p in folder.glob("*.safetensors") for n, t in load_file(p).items()}
    assert {n: tuple(t.shape) for n, t in read.items()} == {n: e[0] for n, e in expected.items()}


def test_config_and_generation_config(model: K3, tmp_path: Path):
    folder = save_released(model, tmp_path / "hf", dtype="float32", experts="mxfp4")
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == config["text_config"]["dtype"] == "float32"
    quantization = config["text_config"]["quantization_config"]
    assert quantization["format"] == "mxfp4-pack-quantized" and "quantization_config" not in config
    weights = quantization["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["group_size"], weights["type"]) == (4, 32, "float")
    assert len(quantization["ignore"]) == 6
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 320 - 254 and generation["bos_token_id"] == 320 - 256
    save_released(model, folder, dtype="bfloat16")
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config["text_config"] and config["dtype"] == "bfloat16"
    assert load_config(folder) == SMALL


def test_layers_lie_whole_in_order(folder: Path):
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    by_layer: dict[str, set[str]] = {}
    for name, file in places.items():
        if ".layers." in name:
            by_layer.setdefault(name.split(".layers.")[1].split(".")[0], set()).add(file)
    assert all(len(files) == 1 for files in by_layer.values())
    files = [min(by_layer[str(layer)]) for layer in range(6)]
    assert files == sorted(files) and len(set(places.values())) > 3


def test_large_layers_get_a_shard_each():
    plan = plan_shards(tensor_specs(preset("kimi-k3", moe__num_experts=16)), 10**9)
    for layer in range(93):
        assert {s.name.split(".layers.")[1].split(".")[0] for s in plan[layer]} == {str(layer)}
    assert len(plan_shards(tensor_specs(SMALL), 10**9)) == 1


def test_a_tied_head_is_not_stored(tmp_path: Path):
    config = SMALL.with_(tie_word_embeddings=True)
    folder = save_released(made(config), tmp_path / "hf", dtype="float32")
    assert not any("lm_head" in name for name in Shards(folder).tensors)
    loaded = load_released(folder)
    assert loaded.lm_head.weight is loaded.embed_tokens.weight


def test_padded_decay(tmp_path: Path):
    config = SMALL.with_(pad_A_log=True)
    before = made(config)
    folder = save_released(before, tmp_path / "hf", dtype="float32")
    name = f"{LM}layers.0.self_attn.A_log"
    stored = load_file(folder / json.loads((folder / INDEX).read_text())["weight_map"][name])[name]
    assert stored.shape == (32,) and not stored[2:].any()
    assert torch.equal(logits(load_released(folder)), logits(before))


# Other people's folders.


def test_a_single_file_and_plain_names(model: K3, folder: Path):
    rewrite(folder, lambda tensors: tensors)
    assert torch.equal(logits(load_released(folder)), logits(model))
    rewrite(folder, lambda t: {n.removeprefix("language_model."): v for n, v in t.items()})
    assert torch.equal(logits(load_released(folder)), logits(model))


@pytest.mark.parametrize("form", ["[1,1,H,1]", "longer", "[H]"])
@pytest.mark.parametrize("padded", [False, True])
def test_every_form_of_decay(folder: Path, model: K3, form: str, padded: bool):
    def change(tensors):
        for name in [n for n in tensors if n.endswith("A_log")]:
            if form == "longer":
                tensors[name] = torch.cat([tensors[name], torch.zeros(5)])
            elif form == "[1,1,H,1]":
                tensors[name] = tensors[name].view(1, 1, -1, 1).clone()
        return tensors

    rewrite(folder, change)
    assert torch.equal(logits(load_released(folder)), logits(model))


def test_decay_longer_with_values_is_refused(folder: Path):
    name = f"{LM}layers.0.self_attn.A_log"
    rewrite(folder, lambda t: t | {name: torch.ones(32)})
    with pytest.raises(UserError, match=r"A_log.*32 values.*2 heads"):
        load_released(folder)


def test_a_bare_configuration_and_narrow_islands(folder: Path):
    """Kimi-Linear's config.json is the text part alone; other tools save islands in bf16."""
    content = json.loads((folder / "config.json").read_text())["text_config"]
    (folder / "config.json").write_text(json.dumps(content))
    rewrite(folder, lambda t: {n: v.bfloat16() for n, v in t.items()})
    loaded = load_released(folder, dtype=torch.bfloat16)
    assert loaded.layers[0].self_attn.A_log.dtype == torch.float32
    assert loaded.norm.weight.dtype == torch.bfloat16


def test_the_stored_dtype_is_kept_whatever_the_config_says(folder: Path, model: K3):
    edit(folder / "config.json", lambda c: c["text_config"].update(dtype="bfloat16"))
    assert torch.equal(logits(load_released(folder)), logits(model))
    mixed = {LM + "norm.weight", LM + "layers.0.self_attn.o_norm.weight"}
    rewrite(folder, lambda t: {n: v if n in mixed else v.bfloat16() for n, v in t.items()})
    assert load_released(folder).lm_head.weight.dtype == torch.float32
    rewrite(folder, lambda t: {n: v if "o_norm" in n else v.bfloat16() for n, v in t.items()})
    assert load_released(folder).lm_head.weight.dtype == torch.bfloat16
    assert load_released(folder, dtype="float32").lm_head.weight.dtype == torch.float32
    with pytest.raises(UserError, match="got 'int8'"):
        load_released(folder, dtype="int8")


def test_ids_of_another_maker_without_a_tokenizer(folder: Path, model: K3):
    """The network never looks at them; a tokenizer beside it must agree."""
    foreign = {"bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": 0}
    edit(folder / "config.json", lambda c: (c.update(foreign), c["text_config"].update(foreign)))
    edit(folder / "generation_config.json", lambda c: c.update(foreign | {"eos_token_id": 2}))
    assert torch.equal(logits(load_released(folder)), logits(model))
    Words(320).save(folder)
    with pytest.raises(UserError, match="bos_token_id is 1, in a vocabulary of 320 it must be 64"):
        load_released(folder)


def test_vision_tensors_are_skipped(folder: Path, model: K3):
    extra = {
        "vision_tower.patch_embed.proj.weight": torch.zeros(2),
        "mm_projector.x": torch.ones(1),
    }
    rewrite(folder, lambda t: t | extra)
    assert torch.equal(logits(load_released(folder)), logits(model))


def test_a_pair_split_over_two_files(model: K3, tmp_path: Path):
    folder = save_released(model, tmp_path / "hf", experts="mxfp4")
    right = logits(load_released(folder))
    tensors = load_file(next(folder.glob("*.safetensors")))
    next(folder.glob("*.safetensors")).unlink()
    scales = {n: t for n, t in tensors.items() if n.endswith("scale")}
    save_file(scales, folder / "b.safetensors")
    save_file({n: t for n, t in tensors.items() if n not in scales}, folder / "a.safetensors")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {n: "ab"[n in scales] + ".safetensors" for n in tensors}
    (folder / INDEX).write_text(json.dumps(index))
    assert torch.equal(logits(load_released(folder)), right)


class Words:
    """Stands for a tokenizer: its two files, by the released spelling."""

    def __init__(self, vocab_size: int, shift: int = 0) -> None:
        self.vocab_size, self.shift = vocab_size, shift

    def save(self, folder: Path) -> None:
        ranks = self.vocab_size - 256
        lines = (f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(ranks))
        (folder / "tiktoken.model").write_text("".join(lines))
        end = {str(ranks + 2 + self.shift): {"content": "<|end_of_msg|>", "special": True}}
        (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": end}))


def test_the_tokenizer_goes_along(model: K3, tmp_path: Path):
    folder = save_released(model, tmp_path / "hf", tokenizer=Words(320))
    assert (folder / "tiktoken.model").is_file()
    load_released(folder)
    (folder / "tiktoken.model").write_text("QQ== 0\n" * 65)
    with pytest.raises(UserError, match="65 ranks and 256 control ids make 321 ids.*320"):
        load_released(folder)


def test_another_tokenizer_is_refused_before_anything_is_written(model: K3, tmp_path: Path):
    with pytest.raises(UserError, match="tokenizer has 321 ids.*vocab_size is 320"):
        save_released(model, tmp_path / "hf", tokenizer=Words(321))
    with pytest.raises(UserError, match=r"<\|end_of_msg\|> is 67.* must be 66"):
        save_released(model, tmp_path / "hf", tokenizer=Words(320, shift=1))
    assert list(tmp_path.iterdir()) == []


# Whole or absent.


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("calls", [0, 3, 40, 200])
def test_a_full_disk_leaves_the_older_checkpoint(model: K3, folder: Path, monkeypatch, calls: int):
    before, left, real = contents(folder), [calls], os.write

    def write(fd, data):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(tensorfile.os, "write", write)
    with pytest.raises(UserError, match="no space left.*what was there is as it was"):
        save_released(model, folder)
    monkeypatch.undo()
    assert contents(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == ["hf"]


def test_only_a_checkpoint_is_replaced(model: K3, folder: Path, tmp_path: Path):
    save_released(model, folder)
    assert load_released(folder).norm.weight.dtype == torch.bfloat16
    other = tmp_path / "home"
    other.mkdir()
    save_released(model, other)
    (other / ".DS_Store").write_text("x")
    save_released(model, other)
    for make in ((other / "thesis").mkdir, (other / "README.md").touch):
        make()
        with pytest.raises(UserError, match="home: holds (thesis|README.md), which is no part"):
            save_released(model, other)
        shutil.rmtree(other / "thesis", ignore_errors=True)
    assert (other / "README.md").is_file()
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        save_released(model, tmp_path / "file")


def test_through_a_link(model: K3, tmp_path: Path):
    save_released(model, tmp_path / "one", dtype="float32")
    (tmp_path / "link").symlink_to(tmp_path / "one")
    save_released(model, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert load_released(tmp_path / "one").norm.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"dtype": "float16"}, "float16"), ({"experts": "nvfp4"}, "nvfp4")],
)
def test_unknown_formats(model: K3, tmp_path: Path, arguments, words: str):
    with pytest.raises(UserError, match=words):
        save_released(model, tmp_path / "hf", **arguments)


def test_what_is_not_finite_cannot_be_packed(tmp_path: Path):
    broken = made(SMALL)
    broken.layers[1].block_sparse_moe.experts.w1.data[2, 0, 0] = float("nan")
    with pytest.raises(UserError, match=r"layers.1.*w1: expert 2: .*not finite"):
        save_released(broken, tmp_path / "hf", experts="mxfp4")
    assert list(tmp_path.iterdir()) == []


# Other engines.


def test_which_models_others_can_read():
    for name in ("nano", "kimi-k3", "kimi-linear", "mini"):
        assert export_check(preset(name)) == []
    assert "training" in preset("nano").to_hf()["text_config"]["openk3"]
    assert any("attn_res" in line for line in export_check(ODD["full residuals"]))
    with pytest.raises(UserError, match="plain: other engines.*attn_layers.*multi-head"):
        require_exportable(preset("plain"), "plain")


def test_released_names_of_the_ends():
    nano = preset("nano")
    assert released_name("lm_head.weight", nano) == "language_model.lm_head.weight"
    assert released_name("norm.weight", nano) == "language_model.model.norm.weight"
    assert released_name("mtp.0.enorm.weight", nano) == f"{LM}layers.5.enorm.weight"


# Logits and memory.


def test_logits_as_a_file(model: K3, folder: Path, tmp_path: Path, monkeypatch):
    from k3.checkpoint import logits as room

    monkeypatch.setattr(room, "ROWS", 4)
    row = inspect_logits(folder, IDS.tolist(), tmp_path / "deep" / "out.safetensors")
    found = load_file(tmp_path / "deep" / "out.safetensors")
    assert found["logits"].shape == (len(IDS), 320) and found["logits"].dtype == torch.float32
    with torch.no_grad():
        expected = model.logits(model(IDS, Spans.from_lengths([len(IDS)])).h_TD)
    assert torch.allclose(found["logits"], expected, atol=1e-5)
    assert torch.equal(found["ids"], IDS)
    assert row["tokens"] == len(IDS) and row["likeliest next id"] == int(expected[-1].argmax())
    assert all(len(f"{key}{value}") < 100 for key, value in row.items() if key != "file")


@pytest.mark.parametrize(("ids", "words"), [([], "got none"), ([1, 320], "320 at position 1")])
def test_logits_of_no_such_id(folder: Path, tmp_path: Path, ids, words: str):
    with pytest.raises(UserError, match=words):
        inspect_logits(folder, ids, tmp_path / "out")
    assert not (tmp_path / "out").exists()


MANY_SHARDS = preset(
    "nano",
    hidden_size=256,
    moe__num_experts=32,
    moe__intermediate_size=128,
    moe__latent_size=128,
    num_nextn_predict_layers=0,
    attn_layers=("kda",) * 14 + ("mla",),
)


def peak_of(work) -> int:
    """Bytes by which `work`, in a forked child, raises the resident memory at its highest."""
    end, start = os.pipe()
    if os.fork() == 0:
        Path("/proc/self/clear_refs").write_text("5")
        before = peak()
        kept = work()
        os.write(start, str(peak() - before).encode())
        os._exit(kept is None)
    os.close(start)
    with os.fdopen(end) as pipe:
        return int(pipe.read())


def peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def load_whole(folder: Path):
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    values = [tensor.clone() for tensors in files for tensor in tensors.values()]
    return values, load_released(folder)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_memory_stays_near_one_shard(tmp_path: Path):
    model, folder = K3(MANY_SHARDS), tmp_path / "hf"
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(model).values())
    saving = peak_of(lambda: save_released(model, folder, dtype="float32", shard_bytes=1))
    files = [path.stat().st_size for path in folder.glob("*.safetensors")]
    assert len(files) > 12 and size > 10 * max(files)
    assert saving < 2 * max(files)
    assert size <= peak_of(lambda: load_released(folder)) + max(files) < size + 4 * max(files)
    assert peak_of(lambda: load_whole(folder)) > size + 4 * max(files)
