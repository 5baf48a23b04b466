"""Parameter arithmetic against the report's numbers, and cost per token against counting."""

from pathlib import Path

import pytest
import torch
from checkpoint_models import ALL

from k3.checkpoint.params import (
    active_params,
    flops_per_token,
    flops_rows,
    mixture_sizes,
    module_rows,
    param_rows,
    parts,
    total_params,
    vision_params,
)
from k3.model import attnres
from k3.model.config import AttnResConfig
from k3.model.presets import preset
from k3.model.transformer import K3
from k3.ops.spans import Spans

K3_PARTS = {
    "routed experts": 2_722_740_830_208,
    "KDA": 30_618_086_496,
    "shared experts": 12_155_092_992,
    "MLA": 5_572_706_304,
    "latent projections": 4_727_310_336,
    "embedding": 1_174_405_120,
    "lm_head": 1_174_405_120,
    "dense feed-forward": 726_663_168,
    "router": 590_955_008,
    "AttnRes": 2_680_832,
    "RMSNorms": 1_340_416,
}
K3_MODULES = {
    "KDA layer": 443_740_384,
    "MLA layer": 232_196_096,
    "one routed expert": 33_030_144,
    "latent projections": 51_383_808,
    "shared experts": 132_120_576,
    "router": 6_423_424,
    "dense feed-forward": 726_663_168,
}


def test_kimi_k3():
    config = preset("kimi-k3")
    assert {part.name: part.total for part in parts(config)} == K3_PARTS
    assert total_params(config) == 2_779_484_476_000
    assert round(active_params(config) / 1e9, 2) == 104.19
    assert vision_params(config) == 401_214_464 + 46_144_512
    rows = {row["part"]: row for row in param_rows(config)}
    assert rows["model total"]["parameters"] == 2_779_931_834_976
    assert rows["routed experts"]["share"] == "97.96%"
    assert {row["module"]: row["parameters"] for row in module_rows(config)} == K3_MODULES


def test_kimi_linear():
    config = preset("kimi-linear")
    assert total_params(config) == 49_122_681_728
    assert round(active_params(config) / 1e9, 2) == 3.11
    modules = {row["module"]: row["parameters"] for row in module_rows(config)}
    assert modules["KDA layer"] == 39_514_272 and modules["MLA layer"] == 29_114_880


@pytest.mark.parametrize("name", ALL)
def test_the_total_is_the_models_own(name: str):
    model = K3(ALL[name], device="meta")
    tensors = [*model.parameters(), *model.buffers()]
    assert total_params(ALL[name]) == sum(t.numel() for t in tensors)


def test_what_counts_as_active():
    nano = preset("nano")
    active = {part.name: part.active for part in parts(nano)}
    assert active["embedding"] == 0 and active["multi-token prediction"] == 0
    assert active["routed experts"] * 4 == total_of(nano, "routed experts")
    tied = {part.name: part.active for part in parts(nano.with_(tie_word_embeddings=True))}
    assert tied["embedding"] == nano.vocab_size * nano.hidden_size and "lm_head" not in tied
    # Tying saves parameters and changes no multiplication.
    assert active_params(nano.with_(tie_word_embeddings=True)) == active_params(nano)


def total_of(config, name: str) -> int:
    return next(part.total for part in parts(config) if part.name == name)


def test_matrix_operations_are_twice_the_active_matrices():
    config = preset("kimi-k3")
    active = active_params(config)
    small = (93 * 4 + 2) * 7168 + 187 * 7168  # residual queries and norms
    small += 69 * (96 + 12288 + 128) + 24 * (1536 + 512) + 92 * (3584 + 896)
    assert flops_per_token(config, 1)["matrices"] == pytest.approx(2 * (active - small), rel=1e-12)


@pytest.mark.parametrize("name", ["nano", "plain", "k2-like", "low-rank gate", "tied"])
def test_matrix_operations_are_those_of_a_forward_pass(name: str, monkeypatch):
    config, tokens, seen = ALL[name], 6, [0]
    real = torch.nn.functional.linear

    def linear(x, weight):
        seen[0] += 2 * x[..., 0].numel() * weight.numel()
        return real(x, weight)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    model = K3(config)
    with torch.no_grad():
        model.logits(model(torch.arange(tokens), Spans.from_lengths([tokens])).h_TD)
    # Routed experts and convolutions are no linear maps of the model.
    routed = sum(part.active for part in parts(config) if part.name == "routed experts")
    taps = config.kda.width * 3 * config.kda.conv_size if config.kda else 0
    rest = 2 * (routed + taps * config.attn_layers.count("kda"))
    assert flops_per_token(config, 1)["matrices"] == seen[0] / tokens + rest


def test_what_grows_with_the_context():
    config = preset("kimi-k3")
    short, long = flops_per_token(config, 4096), flops_per_token(config, 8192)
    assert long["softmax"] / short["softmax"] == pytest.approx(8193 / 4097)
    # 24 layers of 96 heads: a dot product over 192 and a sum over 128 for each key.
    assert short["softmax"] == 24 * 96 * 2 * (192 + 128) * 4097 / 2
    assert short["kda"] == long["kda"] == 69 * 7 * 96 * 128 * 128
    assert short["forward"] == sum(short[k] for k in ("matrices", "softmax", "kda", "attnres"))
    assert short["training"] == 3 * short["forward"] and short["mtp"] == 0


def test_mtp_costs_only_in_training():
    nano = preset("nano")
    with_mtp = flops_per_token(nano, 64)
    without = flops_per_token(nano.with_(num_nextn_predict_layers=0), 64)
    assert with_mtp["forward"] == without["forward"] and with_mtp["mtp"] > 0
    assert with_mtp["training"] == without["training"] + 3 * with_mtp["mtp"]


def test_sources_of_each_mixture():
    # Block 0 reads the embedding alone (a copy), then with its own sum; nano has blocks of two.
    assert mixture_sizes(preset("nano")) == [2, 2, 2, 2, 3, 3, 3, 3, 4, 4]
    full = preset("nano", attnres=AttnResConfig(kind="full"))
    assert mixture_sizes(full) == list(range(2, 12))
    assert mixture_sizes(preset("plain")) == []
    sizes = mixture_sizes(preset("kimi-k3"))
    assert max(sizes) == 9 and sizes[-1] == 9


def test_mixtures_are_counted_as_the_model_reads_them(monkeypatch):
    for kind in ("block", "full"):
        config = preset("nano", attnres__kind=kind)
        found = []

        def mix(sources, query_D, gamma_D, eps, found=found):
            found.append(len(sources))
            return sources[0]

        monkeypatch.setattr(attnres, "mix", mix)
        model = K3(config)
        model(torch.arange(6), Spans.from_lengths([6]))
        assert found == mixture_sizes(config), kind


@pytest.mark.parametrize("name", ["nano", "plain", "k2-like", "kimi-linear"])
def test_rows_leave_out_what_is_not_there(name: str):
    config = preset(name)
    assert all(row["parameters"] > 0 for row in param_rows(config))
    assert all(row["per token"] > 0 for row in flops_rows(config, 128))
    assert all(row["parameters"] > 0 for row in module_rows(config))


def test_the_page_has_these_numbers():
    page = (Path(__file__).parents[2] / "docs" / "checkpoint.md").read_text().split("## Sizes")[1]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    assert len(rows) > 6
    for name, total, active, forward, training in rows[1:]:
        config = preset(name)
        assert total == f"{total_params(config):,}" and active == f"{active_params(config):,.0f}"
        flops = flops_per_token(config, 4096)
        assert (float(forward), float(training)) == pytest.approx(
            (flops["forward"] / 1e9, flops["training"] / 1e9), rel=1e-3
        )
