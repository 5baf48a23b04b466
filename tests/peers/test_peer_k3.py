"""Ours against the released code and mlx-lm: one checkpoint of ours, opened by both."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from mlx_peer import MLX
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
from vendor import Vendor, package_folder

from k3.checkpoint.released import load_released, save_released
from k3.model.config import K3Config
from k3.model.transformer import K3

pytestmark = pytest.mark.peers

TOKENS = 37
LOGITS, LOSS, GRADIENT = 1e-4, 1e-6, 1e-5
"""Largest absolute error of a logit; relative error of a loss; relative RMS error of a gradient."""

MODELS = {
    "1-layer-dense": tiny(1, attnres__block_size=1),
    "1-layer-moe": tiny(1, first_k_dense=0, moe__num_shared_experts=0, attnres__block_size=12),
    "2-layers-24": tiny(2, kda__head_dim=24, kda__num_heads=5, attnres__block_size=1),
    "3-layers-32": tiny(3, kda__head_dim=32, kda__num_heads=1, mla__num_heads=3),
    "4-layers-no-query-latent": tiny(
        4, kda__num_heads=4, mla__q_lora_rank=None, attnres__block_size=3
    ),
    "5-layers-one-block": tiny(5, attnres__block_size=12, moe__num_shared_experts=1),
    "6-layers-24-no-shared": tiny(
        6, kda__head_dim=24, attnres__block_size=3, moe__num_shared_experts=0
    ),
    "7-layers-block-1": tiny(7, kda__head_dim=32, kda__num_heads=5, attnres__block_size=1),
    "8-layers-all-mla": tiny(4, attn_layers=("mla",) * 8, attnres__block_size=3),
    "12-layers-1:1": tiny(12, attn_layers=("kda", "mla") * 6, attnres__block_size=12),
    "13-layers": tiny(13, attnres__block_size=3),
    "13-layers-released-block": tiny(13, kda__head_dim=24, attnres__block_size=12),
    "two-dense-first": tiny(5, first_k_dense=2, tie_word_embeddings=True),
    "with-mtp": tiny(3, num_nextn_predict_layers=1),
    "plain-residual": tiny(4, attnres__kind="none"),
    "softplus-decay": tiny(4, kda__lower_bound=None, kda__full_rank_gate=False),
    "other-bound": tiny(3, kda__lower_bound=-2.5, kda__conv_size=3, situ_beta=2.0),
    "no-mla-gate": tiny(4, mla__output_gate=False, situ_linear_beta=3.0),
    "full-width-experts": tiny(4, moe__latent_size=None, moe__routed_scaling_factor=2.446),
    "no-latent-norm": tiny(4, moe__latent_norm=False, moe__renormalize=False),
    "one-expert-a-token": tiny(4, moe__top_k=1, moe__latent_norm=False),
    "every-expert": tiny(3, moe__top_k=8, moe__latent_norm=False),
}

WRONG = [
    ("attnres__block_size", 2),
    ("kda__lower_bound", -4.9),
    ("kda__lower_bound", None),
    ("mla__latent_norm_eps", 1e-5),
    ("mla__rope_theta", 10000.0),
    ("rms_norm_eps", 1e-6),
    ("situ_beta", 3.9),
    ("situ_linear_beta", 10.0),
    ("activation", "swiglu"),
    ("moe__top_k", 2),
    ("moe__renormalize", False),
    ("moe__routed_scaling_factor", 1.01),
]


@dataclass
class Case:
    config: K3Config
    folder: Path
    _decoded: dict[int, Tensor] = field(default_factory=dict)

    @cached_property
    def drawn(self) -> tuple[K3, list[int]]:
        model, ids = comparable(self.config, TOKENS)
        save_released(model, self.folder, dtype="float32")
        return model, ids

    @property
    def model(self) -> K3:
        return self.drawn[0]

    @property
    def ids(self) -> list[int]:
        return self.drawn[1]

    @cached_property
    def logits(self) -> Tensor:
        return logits(self.model, self.ids)

    def decoded(self, prefill: int) -> Tensor:
        if prefill not in self._decoded:
            self._decoded[prefill] = decode(self.model, self.ids, prefill)
        return self._decoded[prefill]

    @cached_property
    def gradients(self) -> tuple[float, dict[str, Tensor]]:
        return loss_and_gradients(self.model, self.ids)

    @cached_property
    def vendor(self) -> Vendor:
        package_folder("llmcompressor")
        assert self.drawn
        return Vendor(self.folder)

    @cached_property
    def mlx(self) -> MLX:
        package_folder("mlx_lm")
        assert self.drawn
        return MLX(self.folder)


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(MODELS[request.param], tmp_path_factory.mktemp("peer") / "model")


def assert_near(name: str, actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    error = float((actual - expected).abs().max())
    assert error <= LOGITS, f"{name}: a logit differs by {error:.2g}"
    assert float(expected.std()) > 0.1, f"{name}: logits too flat to compare"


def assert_gradients_near(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    worst = sorted(gradient_errors(actual, expected))[-3:]
    assert worst[-1][0] <= GRADIENT, f"relative RMS errors {worst}"


def test_released_code_logits(case: Case) -> None:
    assert_near("released code", case.vendor.logits(case.ids), case.logits)


def test_mlx_logits(case: Case) -> None:
    assert_near("mlx-lm", case.mlx.logits(case.ids), case.logits)


@pytest.mark.parametrize("prefill", [1, 7])
def test_released_code_cached_logits(case: Case, prefill: int) -> None:
    assert_near("ours, cached", case.decoded(prefill), case.logits)
    assert_near("released code", case.vendor.decode(case.ids, prefill), case.decoded(prefill))


@pytest.mark.parametrize("prefill", [1, 7])
def test_mlx_cached_logits(case: Case, prefill: int) -> None:
    assert_near("mlx-lm", case.mlx.decode(case.ids, prefill), case.decoded(prefill))


def test_released_code_loss_and_gradients(case: Case) -> None:
    loss, gradients = case.vendor.loss_and_gradients(case.ids, next_token_loss)
    ours, expected = case.gradients
    assert loss == pytest.approx(ours, rel=LOSS)
    assert_gradients_near(gradients, expected)


def test_mlx_loss_and_gradients(case: Case) -> None:
    loss, gradients = case.mlx.loss_and_gradients(case.ids)
    ours, expected = case.gradients
    assert loss == pytest.approx(ours, rel=LOSS)
    assert_gradients_near(gradients, case.mlx.renamed(expected))


def test_reading_back_gives_the_same_bits(case: Case) -> None:
    assert case.drawn
    assert torch.equal(logits(load_released(case.folder), case.ids), case.logits)


@pytest.mark.parametrize("change", WRONG, ids=str)
def test_a_wrong_number_in_the_configuration_is_seen(
    change: tuple[str, Any], tmp_path: Path
) -> None:
    """The same weights in a network that is wrong in one constant fail the comparison above."""
    case = Case(tiny(6, attnres__block_size=3, moe__latent_norm=False), tmp_path / "model")
    wrong = K3(case.config.with_(**dict([change]))).eval()
    wrong.load_state_dict(case.model.state_dict())
    error = float((logits(wrong, case.ids) - case.vendor.logits(case.ids)).abs().max())
    assert error > 3 * LOGITS, f"{change} changes a logit by {error:.2g} only"
