"""Ours against the released code and mlx-lm: one checkpoint of ours, opened by both."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import torch
from mlx_peer import MLX
from tiny_models import (
    clear_ids,
    decode,
    logits,
    loss_and_gradients,
    next_token_loss,
    random_model,
    tiny,
)
from torch import Tensor
from vendor import Vendor

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
    "4-layers-no-query-latent": tiny(4, mla__q_lora_rank=None, attnres__block_size=3),
    "5-layers-one-block": tiny(5, attnres__block_size=12, moe__num_shared_experts=1),
    "6-layers-24-no-shared": tiny(
        6, kda__head_dim=24, attnres__block_size=3, moe__num_shared_experts=0
    ),
    "7-layers-block-1": tiny(7, kda__head_dim=32, kda__num_heads=2, attnres__block_size=1),
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


@dataclass
class Case:
    config: K3Config
    folder: Path

    @cached_property
    def model(self) -> K3:
        model = random_model(self.config)
        save_released(model, self.folder, dtype="float32")
        return model

    @cached_property
    def ids(self) -> list[int]:
        return clear_ids(self.model, TOKENS)

    @cached_property
    def logits(self) -> Tensor:
        return logits(self.model, self.ids)

    @cached_property
    def gradients(self) -> tuple[float, dict[str, Tensor]]:
        return loss_and_gradients(self.model, self.ids)

    @cached_property
    def vendor(self) -> Vendor:
        _ = self.model
        return Vendor(self.folder)

    @cached_property
    def mlx(self) -> MLX:
        _ = self.model
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
    """Both by the same names; a missing one must be zero on the other side."""
    worst = []
    for name in actual.keys() | expected.keys():
        if name not in actual or name not in expected:
            alone = (actual if name in actual else expected)[name]
            assert not alone.any(), f"{name}: a gradient on one side only"
            continue
        scale = expected[name].square().mean().sqrt()
        error = (actual[name] - expected[name]).square().mean().sqrt()
        assert actual[name].shape == expected[name].shape, name
        worst.append((float(error / scale) if scale > 0 else float(error), name))
    ratio, name = max(worst)
    assert ratio <= GRADIENT, f"{name}: relative RMS error {ratio:.2g}, then {sorted(worst)[-4:-1]}"


def test_released_code_logits(case: Case) -> None:
    assert_near("released code", case.vendor.logits(case.ids), case.logits)


def test_mlx_logits(case: Case) -> None:
    assert_near("mlx-lm", case.mlx.logits(case.ids), case.logits)


def test_our_cached_logits_equal_the_peers_whole_pass(case: Case) -> None:
    expected = case.mlx.logits(case.ids)
    for prefill in (1, 7):
        assert_near(f"prefill {prefill}", decode(case.model, case.ids, prefill), expected)


def test_released_code_cached_logits(case: Case) -> None:
    if "mla" not in case.config.attn_layers:
        pytest.skip("the released cache needs an MLA layer")
    assert_near("released code", case.vendor.decode(case.ids, 7), decode(case.model, case.ids, 7))


def test_mlx_cached_logits(case: Case) -> None:
    for prefill in (1, 7):
        ours = decode(case.model, case.ids, prefill)
        assert_near("mlx-lm", case.mlx.decode(case.ids, prefill), ours)


def test_released_code_loss_and_gradients(case: Case) -> None:
    loss, gradients = case.vendor.loss_and_gradients(case.ids, next_token_loss)
    ours, expected = case.gradients
    assert loss == pytest.approx(ours, rel=LOSS)
    if case.config.tie_word_embeddings:
        pytest.skip("the released code unties the gradient")
    assert_gradients_near(gradients, expected)


def test_mlx_loss_and_gradients(case: Case) -> None:
    loss, gradients = case.mlx.loss_and_gradients(case.ids)
    ours, expected = case.gradients
    assert loss == pytest.approx(ours, rel=LOSS)
    assert_gradients_near(gradients, case.mlx.renamed(expected))


def test_reading_back_gives_the_same_bits(case: Case) -> None:
    again = load_released(case.folder) if case.model else None
    assert again is not None and torch.equal(logits(again, case.ids), case.logits)
