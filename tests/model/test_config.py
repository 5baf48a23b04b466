"""The config tree: released keys in and out, presets, refusals."""

from __future__ import annotations

import pytest
import torch

from k3 import UserError
from k3.model.config import K3Config, MHAConfig, control_id
from k3.model.presets import PRESETS, family, hybrid, preset
from k3.model.transformer import K3

ARMS = {
    "softplus": {"kda__lower_bound": None},
    "low-rank-gate": {"kda__full_rank_gate": False},
    "no-gate": {"mla__output_gate": False},
    "rope": {"mla__rope_theta": 10000.0},
    "full": {"attnres__kind": "full"},
    "plain-residual": {"attnres__kind": "none"},
    "random": {"attnres__query": "random"},
    "full-width": {"moe__latent_size": None},
    "no-norm": {"moe__latent_norm": False},
    "swiglu": {"activation": "swiglu"},
    "sign": {"moe__balance": "sign", "moe__sign_step": 3e-3},
    "tied": {"tie_word_embeddings": True},
    "dense": {"moe": None},
    "eps": {"mla__latent_norm_eps": 1e-5},
    "released-init": {"initializer_range": 0.02},
    "no-mtp": {"num_nextn_predict_layers": 0},
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_its_own_config_json(name: str) -> None:
    config = preset(name)
    assert K3Config.from_hf(config.to_hf()) == config


@pytest.mark.parametrize("arm", ARMS)
def test_every_alternative_survives_its_own_config_json(arm: str) -> None:
    config = preset("nano", **ARMS[arm])
    assert config != preset("nano")
    assert K3Config.from_hf(config.to_hf()) == config


def test_a_model_that_is_all_kda_keeps_its_layers() -> None:
    config = preset("nano", attn_layers=("kda",) * 5)
    assert K3Config.from_hf(config.to_hf()) == config


def test_released_layer_map() -> None:
    kimi = preset("kimi-k3")
    full = [layer + 1 for layer, kind in enumerate(kimi.attn_layers) if kind == "mla"]
    assert full == [*range(4, 93, 4), 93]
    text = kimi.to_hf()["text_config"]
    assert text["linear_attn_config"]["full_attn_layers"] == full
    assert len(text["linear_attn_config"]["kda_layers"]) == 69
    linear = preset("kimi-linear")
    assert [i + 1 for i, k in enumerate(linear.attn_layers) if k == "mla"] == [*range(4, 25, 4), 27]


def test_parameter_totals_of_the_released_shapes() -> None:
    for name, total in (("kimi-k3", 2_779_484_476_000), ("kimi-linear", 49_122_681_728)):
        model = K3(preset(name), device="meta", dtype=torch.bfloat16)
        biases = sum(router.e_score_correction_bias.numel() for router in model.routers())
        assert sum(p.numel() for p in model.parameters()) + biases == total


def test_sizes_of_our_presets() -> None:
    def count(name: str) -> int:
        return sum(p.numel() for p in K3(preset(name), device="meta").parameters())

    assert count("nano") <= 1_500_000
    assert 1.00e9 < count("mini-r1") < 1.04e9
    nano = preset("nano")
    assert nano.attn_layers.count("mla") >= 2
    assert -(-nano.num_hidden_layers // nano.attnres.block_size) >= 3
    assert nano.moe is not None and nano.moe.latent_size is not None
    assert nano.moe.latent_size % 32 == 0 and nano.moe.intermediate_size % 32 == 0


def test_control_ids_of_the_released_vocabulary() -> None:
    kimi = preset("kimi-k3")
    ids = (kimi.bos_token_id, kimi.eos_token_id, kimi.pad_token_id, kimi.media_placeholder_token_id)
    assert ids == (163584, 163586, 163839, 163605)
    nano = preset("nano")
    assert (nano.eos_token_id, nano.pad_token_id) == (2048 - 254, 2048 - 1)
    assert control_id(2048, 163587) == 2048 - 253


def test_hybrid_always_ends_in_full_attention() -> None:
    assert hybrid(5) == ("kda", "kda", "kda", "mla", "mla")
    assert hybrid(1) == ("mla",)
    assert hybrid(4, ratio=1) == ("kda", "mla", "kda", "mla")
    assert all(hybrid(n)[-1] == "mla" for n in range(1, 20))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"moe__top_k": 17}, ("top_k", "17", "16")),
        ({"kda__lower_bound": -6.0}, ("lower_bound", "-6")),
        ({"attn_layers": ("mla", "rnn")}, ("attn_layers", "rnn")),
        ({"attn_layers": ("mha",)}, ("mha", "None")),
        ({"activation": "gelu"}, ("activation", "gelu")),
        ({"vocab_size": 256}, ("vocab_size", "256")),
        ({"mla": None, "attn_layers": ("kda",)}, ("num_nextn_predict_layers", "mla")),
        ({"attnres__kind": "some"}, ("attnres.kind", "some")),
        (
            {"mha": MHAConfig(num_heads=3, head_dim=8), "attn_layers": ("mla", "mha")},
            ("heads", "2", "3"),
        ),
    ],
)
def test_a_wrong_shape_is_refused_in_one_line(changes: dict, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        preset("nano", **changes)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("hidden_size", None, ("hidden_size",)),
        ("hidden_size", "112", ("hidden_size", "112")),
        ("hidden_act", "gelu", ("hidden_act", "gelu")),
        ("moe_router_activation_func", "softmax", ("moe_router_activation_func", "softmax")),
        ("model_type", "llama", ("model_type", "llama")),
        ("num_hidden_layers", 6, ("kda_layers", "6")),
        ("openk3", {"training": {"balance": "loss"}}, ("balance", "loss")),
        ("openk3", {"training": "x"}, ("training", "'x'")),
        ("openk3", {"attn_layers": 3}, ("attn_layers", "3")),
        ("openk3", {"mha": {"num_heads": "two"}}, ("num_heads", "'two'")),
        ("linear_attn_config", {"num_heads": 2, "head_dim": 8}, ("kda_layers",)),
        ("linear_attn_config", [1], ("linear_attn_config",)),
        ("num_hidden_layers", 10**9, ("num_hidden_layers", "1000000000")),
    ],
)
def test_a_wrong_config_json_names_its_key(key: str, value: object, words: tuple[str, ...]) -> None:
    config = preset("nano").to_hf()
    if value is None:
        del config["text_config"][key]
    else:
        config["text_config"][key] = value
    with pytest.raises(UserError) as caught:
        K3Config.from_hf(config)
    assert all(word in str(caught.value) for word in words), caught.value


def test_null_is_the_same_as_absent() -> None:
    config = preset("nano").to_hf()
    config["text_config"] |= {"first_k_dense_replace": None, "moe_renormalize": None}
    assert K3Config.from_hf(config) == preset("nano")


def test_an_unknown_preset_lists_the_known() -> None:
    with pytest.raises(UserError, match="nano"):
        preset("nanno")
    with pytest.raises(UserError, match="depth"):
        family(3)
