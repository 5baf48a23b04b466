"""QK-clip on an attention small enough to compute by hand."""

import pytest
import torch

from k3.ops.facts import ParamFacts
from k3.optim.qk_clip import qk_clip_

H, NOPE, SHARED, VALUE, RANK, T = 3, 4, 2, 5, 6, 7

FACTS = {
    "q_b": ParamFacts("matrix", True, H, (NOPE + SHARED,), None, 0, ((NOPE, 0.5), (SHARED, 1.0))),
    "kv_b": ParamFacts("matrix", True, H, (NOPE, VALUE), None, 0, ((NOPE, 0.5), (VALUE, 0.0))),
    "k_shared": ParamFacts("matrix", True),
    "other": ParamFacts("matrix", True, H, (NOPE,), None, 1, ((NOPE, 0.5),)),
}


def weights(dtype=torch.float64):
    torch.manual_seed(0)
    shapes = {
        "q_b": (H * (NOPE + SHARED), RANK),
        "kv_b": (H * (NOPE + VALUE), RANK),
        "k_shared": (SHARED, RANK),
        "other": (H * NOPE, RANK),
    }
    named = {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
    named["q_b"].view(H, -1, RANK)[1] *= 40.0
    return named


def max_logits(named):
    """Largest causal logit of each head, [H]."""
    torch.manual_seed(1)
    x = torch.randn(T, RANK, dtype=torch.float64)
    q = (x @ named["q_b"].double().T).view(T, H, NOPE + SHARED)
    k_nope = (x @ named["kv_b"].double().T).view(T, H, NOPE + VALUE)[..., :NOPE]
    k_shared = (x @ named["k_shared"].double().T)[:, None].expand(T, H, SHARED)
    k = torch.cat([k_nope, k_shared], -1)
    logits = torch.einsum("thd,shd->hts", q, k) * (NOPE + SHARED) ** -0.5
    return logits.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).amax((1, 2))


def test_one_clip_brings_the_head_to_the_limit_and_leaves_the_others_alone():
    named = weights()
    before = {name: value.clone() for name, value in named.items()}
    high = max_logits(named)
    tau = float(high[1]) / 10
    assert (high[[0, 2]] < tau).all() and high[1] > tau
    per_layer = torch.stack([high, torch.zeros(H, dtype=torch.float64)])
    gamma = qk_clip_(named.items(), FACTS, per_layer, tau)
    after = max_logits(named)
    assert float(after[1]) == pytest.approx(tau, abs=1e-5)
    assert gamma[0].tolist() == pytest.approx([1.0, 0.1, 1.0])
    assert torch.equal(after[[0, 2]], high[[0, 2]])
    assert torch.equal(named["k_shared"], before["k_shared"])
    assert torch.equal(named["other"], before["other"])
    values = [n["kv_b"].view(H, NOPE + VALUE, RANK)[:, NOPE:] for n in (named, before)]
    assert torch.equal(values[0], values[1])
    heads = [n["q_b"].view(H, -1, RANK)[[0, 2]] for n in (named, before)]
    assert torch.equal(heads[0], heads[1])


def test_scaling_the_shared_query_rows_like_the_others_would_miss():
    named = weights()
    high = max_logits(named)
    tau = float(high[1]) / 10
    wrong = dict(FACTS)
    wrong["q_b"] = ParamFacts("matrix", True, H, (NOPE + SHARED,), None, 0, ((6, 0.5),))
    qk_clip_(named.items(), wrong, torch.stack([high, high * 0]), tau)
    assert abs(float(max_logits(named)[1]) - tau) > 1e-2


@pytest.mark.parametrize("logit", [-torch.inf, -5.0, 0.0, 99.0, 100.0])
def test_heads_within_the_limit_change_nothing(logit):
    named = weights(torch.bfloat16)
    before = {name: value.clone() for name, value in named.items()}
    gamma = qk_clip_(named.items(), FACTS, torch.full((2, H), logit), 100.0)
    assert torch.equal(gamma, torch.ones(2, H))
    assert all(torch.equal(named[name], before[name]) for name in named)
