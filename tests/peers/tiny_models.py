"""Small random models in K3's shape, nothing at its starting value, and what ours makes of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from awake import awake
from torch import Tensor

from k3.checkpoint.layout import tensor_specs
from k3.model.config import AttnResConfig, K3Config, KDAConfig, MLAConfig, MoEConfig
from k3.model.presets import hybrid
from k3.model.state import DenseState
from k3.model.transformer import K3
from k3.ops.spans import Spans

CLEAR = 1e-5
"""Smallest distance between the last chosen expert and the next, in every choice: closer ones are
decided by rounding, differently in every implementation."""

WRITERS = (
    "self_attn.o_proj.weight",
    "mlp.down_proj.weight",
    "shared_experts.down_proj.weight",
    "routed_expert_up_proj.weight",
)
SMALL = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight", "k_conv1d.weight")


def tiny(layers: int = 4, **changes: Any) -> K3Config:
    """4 layers, 48 wide, 8 experts; KDA with 3 heads of 16, MLA with 2 of 20 + 12; fields replaced
    as `K3Config.with_` does.
    """
    base = K3Config(
        vocab_size=320,
        hidden_size=48,
        intermediate_size=80,
        attn_layers=hybrid(layers),
        kda=KDAConfig(num_heads=3, head_dim=16),
        mla=MLAConfig(
            num_heads=2,
            q_lora_rank=28,
            kv_lora_rank=24,
            qk_nope_head_dim=20,
            qk_rope_head_dim=12,
            v_head_dim=18,
        ),
        moe=MoEConfig(
            num_experts=8, top_k=3, num_shared_experts=2, intermediate_size=32, latent_size=32
        ),
        attnres=AttnResConfig(block_size=2),
    )
    return base.with_(**changes)


@torch.no_grad()
def random_model(config: K3Config, seed: int = 2) -> K3:
    """Our initialisation, then every query, norm, decay and selection bias moved off its start.

    Sublayers write 1/sqrt(2L) beside an embedding of 1: where they write as much as they read, a
    deep random network enlarges rounding errors a thousandfold, in every implementation alike, and
    the comparison would have to be as lax. Latents and keys are small before their norms, so that
    the eps of each norm is seen.
    """
    torch.manual_seed(seed)
    model = awake(K3(config)).eval()
    for name, facts in model.param_facts().items():
        p = model.get_parameter(name)
        noise = torch.randn_like(p)
        if facts.role == "embedding":
            p.copy_(noise)
        elif facts.role == "query":
            p.copy_(0.5 * noise * p.shape[-1] ** -0.5)
        elif facts.role == "norm":
            p.add_(0.2 * noise)
        elif name.endswith("A_log"):
            p.copy_(0.5 * noise)
        elif name.endswith("dt_bias"):
            p.copy_(noise - 1)
        elif name.endswith(WRITERS):
            p.mul_((2 * config.num_hidden_layers) ** -0.5)
        elif name.endswith(SMALL):
            p.mul_(0.05)
    for router in model.routers():
        router.e_score_correction_bias.uniform_(-0.2, 0.2)
    return model


def comparable(config: K3Config, count: int) -> tuple[K3, list[int]]:
    """A random model and ids with no near tie in any router.

    Ordinary ids only: the released code leaves the pad row of the embedding without a gradient.
    """
    model = random_model(config)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        ids_T = torch.randint(0, config.vocab_size - 256, (count,), generator=generator)
        if _smallest_gap(model, ids_T) > CLEAR:
            return model, ids_T.tolist()
    raise AssertionError("no ids without a near tie in 20 draws")


@torch.no_grad()
def _smallest_gap(model: K3, ids_T: Tensor) -> float:
    gaps = [1.0]

    def measure(router: Any, args: tuple[Any, ...], _: Any) -> None:
        scores = F.linear(args[0], router.weight).sigmoid() + router.e_score_correction_bias
        top = scores.sort(dim=-1, descending=True).values
        if (k := router.config.top_k) < top.shape[-1]:
            gaps.append(float((top[:, k - 1] - top[:, k]).min()))

    hooks = [router.register_forward_hook(measure) for router in model.routers()]
    model(ids_T, Spans.from_lengths([len(ids_T)]))
    for hook in hooks:
        hook.remove()
    return min(gaps)


@torch.no_grad()
def logits(model: K3, ids: list[int]) -> Tensor:
    """[T, V] from one pass."""
    return model.logits(model(torch.tensor(ids), Spans.from_lengths([len(ids)])).h_TD)


@torch.no_grad()
def decode(model: K3, ids: list[int], prefill: int) -> Tensor:
    """[T, V] from `prefill` tokens at once and the rest one by one on the state."""
    state, rows = DenseState(model.config, 1), []
    for chunk in ([*ids[:prefill]], *([token] for token in ids[prefill:])):
        out = model(torch.tensor(chunk), Spans.from_lengths([len(chunk)]), state)
        rows.append(model.logits(out.h_TD))
    return torch.cat(rows)


def next_token_loss(logits_RV: Tensor, targets_R: Tensor) -> Tensor:
    return F.cross_entropy(logits_RV.float(), targets_R)


def loss_and_gradients(model: K3, ids: list[int]) -> tuple[float, dict[str, Tensor]]:
    """The loss of next-token prediction, and gradients by released name; zero where there is
    none.
    """
    model.zero_grad()
    tokens = torch.tensor(ids)
    h_TD = model(tokens[:-1], Spans.from_lengths([len(ids) - 1])).h_TD
    loss = next_token_loss(model.logits(h_TD), tokens[1:])
    loss.backward()
    found = {n: p.grad if p.grad is not None else p * 0 for n, p in model.named_parameters()}
    gradients = {}
    for spec in tensor_specs(model.config, dtype="float32"):
        if spec.source in found:
            g = found[spec.source].detach()
            gradients[spec.name] = g if spec.expert is None else g[spec.expert]
    return loss.item(), gradients


def gradient_errors(
    actual: dict[str, Tensor], expected: dict[str, Tensor]
) -> list[tuple[float, str]]:
    """The relative RMS error of each gradient, by the same names on both sides; one that is missing
    on one side must be zero on the other.

    The A_log of all layers count as one tensor: a head's gradient is a single sum over all tokens
    and channels, and where it nearly cancels it is all rounding, whoever computes it.
    """
    actual, expected = _whole_A_log(actual), _whole_A_log(expected)
    errors = []
    for name in actual.keys() | expected.keys():
        if name not in actual or name not in expected:
            alone = (actual if name in actual else expected)[name]
            assert not alone.any(), f"{name}: a gradient on one side only"
            continue
        assert actual[name].shape == expected[name].shape, name
        errors.append((_rms_error(actual[name], expected[name]), name))
    return errors


def _rms_error(actual: Tensor, expected: Tensor) -> float:
    """RMS of the difference over the RMS of `expected`; 0 where both are zero."""
    error = (actual.double() - expected.double()).square().mean().sqrt()
    return float(error / expected.double().square().mean().sqrt()) if error > 0 else 0.0


def _whole_A_log(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    A_logs = [g.flatten() for name, g in sorted(gradients.items()) if name.endswith("A_log")]
    rest = {name: g for name, g in gradients.items() if not name.endswith("A_log")}
    return rest | ({"A_log": torch.cat(A_logs)} if A_logs else {})
