"""Kimi-Linear against transformers: a folder in its released layout, opened by its loader."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import (
    comparable,
    decode,
    gradient_errors,
    logits,
    loss_and_gradients,
    next_token_loss,
    tiny,
)
from torch import Tensor
from vendor import PREFIX, package_folder, stored

from k3.checkpoint.released import load_released, save_released
from k3.model.config import AttnResConfig, K3Config
from k3.model.presets import preset
from k3.model.transformer import K3

pytestmark = pytest.mark.peers

TOKENS = 70
"""More than one of their chunks of 64."""
LOGITS, LOSS, GRADIENT = 1e-4, 1e-6, 1e-5
"""Largest absolute error of a logit; relative error of a loss; relative RMS error of a gradient."""


def kimi_linear(layers: int, **changes: Any) -> K3Config:
    """The released 48B shape's choices at the size of `tiny`."""
    real = preset("kimi-linear")
    assert real.kda is not None and real.mla is not None and real.moe is not None
    config = tiny(
        layers,
        kda__lower_bound=real.kda.lower_bound,
        kda__full_rank_gate=real.kda.full_rank_gate,
        mla__q_lora_rank=real.mla.q_lora_rank,
        mla__output_gate=real.mla.output_gate,
        moe__latent_size=real.moe.latent_size,
        moe__latent_norm=real.moe.latent_norm,
        moe__num_shared_experts=real.moe.num_shared_experts,
        moe__routed_scaling_factor=real.moe.routed_scaling_factor,
        attnres=AttnResConfig(kind="none"),
        activation=real.activation,
    )
    return config.with_(**changes)


MODELS = {
    "4-layers": kimi_linear(4),
    "3-layers-24": kimi_linear(3, kda__head_dim=24, kda__num_heads=5, mla__q_lora_rank=28),
    "8-layers-32": kimi_linear(8, kda__head_dim=32, kda__num_heads=2, moe__num_shared_experts=2),
}


def write_kimi_linear(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Kimi-Linear's layout: bare names, A_log in four axes, the text configuration alone."""
    folder.mkdir()
    bare = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    for name, tensor in bare.items():
        if name.endswith("A_log"):
            bare[name] = tensor.view(1, 1, -1, 1)
    save_file(bare, folder / "model.safetensors", {"format": "pt"})
    text = {key: value for key, value in config["text_config"].items() if key != "openk3"}
    (folder / "config.json").write_text(json.dumps(text | {"dtype": "float32"}))


def opened(folder: Path) -> Any:
    from transformers import KimiLinearForCausalLM

    model, report = KimiLinearForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[kind], f"{kind}: {report[kind]}"
    return model.eval()


@dataclass
class Case:
    config: K3Config
    place: Path

    @cached_property
    def _drawn(self) -> tuple[K3, list[int]]:
        return comparable(self.config, TOKENS)

    @property
    def model(self) -> K3:
        return self._drawn[0]

    @property
    def ids(self) -> list[int]:
        return self._drawn[1]

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return stored(save_released(self.model, self.place / "ours", dtype="float32"))

    @cached_property
    def theirs(self) -> Any:
        write_kimi_linear(self.place / "theirs", self.config.to_hf(), self.tensors)
        return opened(self.place / "theirs")

    def as_theirs(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by released name, as their loader holds them: their own parameters' names."""
        write_kimi_linear(self.place / "renamed", self.config.to_hf(), tensors)
        return dict(opened(self.place / "renamed").named_parameters())


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    package_folder("transformers")
    return Case(MODELS[request.param], tmp_path_factory.mktemp("kimi-linear"))


def largest(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


def test_logits(case: Case) -> None:
    expected = case.theirs(torch.tensor([case.ids]), use_cache=False).logits[0].detach()
    assert float(expected.std()) > 0.1
    assert largest(logits(case.model, case.ids), expected) <= LOGITS


def test_cached_logits(case: Case) -> None:
    ids, model, rows, cache = case.ids, case.theirs, [], None
    for chunk in (ids[:7], *([token] for token in ids[7:20])):
        with torch.no_grad():
            out = model(torch.tensor([chunk]), past_key_values=cache, use_cache=True)
        rows.append(out.logits[0])
        cache = out.past_key_values
    assert largest(decode(case.model, case.ids[:20], 7), torch.cat(rows)) <= LOGITS


def test_loss_and_gradients(case: Case) -> None:
    ours, gradients = loss_and_gradients(case.model, case.ids)
    model = case.theirs
    rows = model(torch.tensor([case.ids]), use_cache=False).logits[0]
    loss = next_token_loss(rows[:-1], torch.tensor(case.ids[1:]))
    loss.backward()
    assert loss.item() == pytest.approx(ours, rel=LOSS)
    biases = {n: t * 0 for n, t in case.tensors.items() if n.endswith("correction_bias")}
    expected = case.as_theirs(gradients | biases)
    actual = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    worst = sorted(gradient_errors(actual, {n: p.detach() for n, p in expected.items()}))[-3:]
    assert worst[-1][0] <= GRADIENT, f"relative RMS errors {worst}"


def test_ours_opens_that_layout(case: Case) -> None:
    assert case.theirs is not None
    again = load_released(case.place / "theirs")
    assert torch.equal(logits(again, case.ids), logits(case.model, case.ids))


def test_a_bound_would_be_noticed(case: Case) -> None:
    wrong = K3(case.config.with_(kda__lower_bound=-5.0)).eval()
    wrong.load_state_dict(case.model.state_dict())
    assert largest(logits(wrong, case.ids), logits(case.model, case.ids)) > 100 * LOGITS
