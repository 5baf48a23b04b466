"""Quantile Balancing: the toy, one update against the sign rule, and each way to get it wrong."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3.ops.quantile import bias_exact, bias_from_histogram, bias_sign, histogram
from k3.ops.route import route

TOY = torch.tensor(
    [
        [0.81, 0.50, 0.07, 0.22],
        [0.46, 0.42, 0.33, 0.28],
        [0.78, 0.45, 0.13, 0.44],
        [0.93, 0.45, 0.31, 0.43],
        [0.54, 0.27, 0.14, 0.39],
        [0.72, 0.24, 0.10, 0.10],
        [0.63, 0.23, 0.52, 0.25],
        [0.60, 0.68, 0.19, 0.06],
    ]
)
"""m = 8 tokens, n = 4 experts, k = 1, so a share is q = 2; without a bias seven choose expert 0."""


def loads(scores, bias, k):
    chosen = route(scores, bias, k)
    return torch.bincount(chosen.indices_Tk.flatten(), minlength=scores.shape[1])


def excess(load):
    """max load / mean load - 1."""
    return float(load.max() / load.float().mean() - 1)


def skewed(tokens=8192, experts=896, seed=0):
    """Fixed scores of experts that differ in popularity: the worst takes some 30 times the mean."""
    generator = torch.Generator().manual_seed(seed)
    offset = torch.randn(experts, generator=generator)
    return torch.sigmoid(torch.randn(tokens, experts, generator=generator) + offset)


def step(scores, bias, k, kind="exact"):
    cutoff = route(scores, bias, k).cutoff_T
    if kind == "exact":
        return bias_exact(scores, cutoff, k)
    return bias_from_histogram(histogram(scores, cutoff, bias), bias, k, scores.shape[0])


@pytest.mark.parametrize("kind", ["exact", "histogram"])
def test_the_toy_ends_with_two_tokens_each(kind):
    assert loads(TOY, torch.zeros(4), 1).tolist() == [7, 1, 0, 0]
    assert loads(TOY, step(TOY, torch.zeros(4), 1, kind), 1).tolist() == [2, 2, 2, 2]


def wrong_updates(scores, bias, k):
    """Ports' mistakes: k-th score as cutoff, biased scores in the margin, sign, averaged shards."""
    chosen = route(scores, bias, k)
    kth = (scores + bias).topk(k, dim=-1).values[:, -1]
    right = bias_exact(scores, chosen.cutoff_T, k)
    return {
        "k-th score as cutoff": bias_exact(scores, kth, k),
        "biased scores in the margin": bias_exact(scores + bias, chosen.cutoff_T, k),
        "wrong sign": -right,
        "quantile of k / n from the other side": bias_exact(-scores, -chosen.cutoff_T, k),
    }


def test_wrong_updates_do_not_balance():
    generator = torch.Generator().manual_seed(1)
    offset = torch.randn(32, generator=generator)
    scores = torch.sigmoid(torch.randn(4096, 32, generator=generator) + offset)
    bias = step(scores, torch.zeros(32), 4)
    right = excess(loads(scores, step(scores, bias, 4), 4))
    assert right < 0.15
    for name, wrong in wrong_updates(scores, bias, 4).items():
        if name == "k-th score as cutoff":
            continue  # the next test: with one expert per token it shows at once
        assert excess(loads(scores, wrong, 4)) > right + 0.1, name


def test_the_kth_score_as_cutoff_fails_the_toy():
    wrong = wrong_updates(TOY, torch.zeros(4), 1)["k-th score as cutoff"]
    assert loads(TOY, wrong, 1).tolist() != [2, 2, 2, 2]


def test_one_update_balances_896_experts_beside_the_sign_rule():
    scores, k = skewed(), 16
    zero = torch.zeros(896)
    chosen = route(scores, zero, k)
    before = torch.bincount(chosen.indices_Tk.flatten(), minlength=896)
    assert excess(before) > 15
    exact = bias_exact(scores, chosen.cutoff_T, k)
    counts = histogram(scores, chosen.cutoff_T, zero)
    binned = bias_from_histogram(counts, zero, k, scores.shape[0])
    for new in (exact, binned):
        assert excess(loads(scores, new, k)) < 0.6
    for size in (1e-3, 3e-3, 1e-2, 3e-2, 1e-1):
        assert excess(loads(scores, bias_sign(zero, before, size), k)) > 3


@given(
    st.integers(2, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1))),
    st.integers(1, 200),
    st.integers(0, 10**6),
)
def test_a_share_of_margins_beats_the_new_threshold(shape, tokens, seed):
    experts, k = shape
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator, dtype=torch.float64)
    bias = torch.randn(experts, generator=generator, dtype=torch.float64) * 0.3
    cutoff = (scores + bias).topk(k + 1, dim=-1).values[:, k]
    new = bias_exact(scores, cutoff, k)
    margins = (scores - cutoff.unsqueeze(1)).sort(0, descending=True).values
    share = tokens * k // experts
    right = -margins[share]
    assert torch.allclose(new, right - right.mean())
    # an expert that is the cutoff of several tokens has the margin -b there, so ties are ordinary
    assert (((margins + right) > 0).sum(0) <= share).all()
    assert (((margins + right) >= 0).sum(0) > share).all()


@given(
    st.integers(2, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1))),
    st.integers(1, 300),
    st.integers(0, 10**6),
)
def test_histogram_within_one_bin_of_the_quantile(shape, tokens, seed):
    experts, k = shape
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator)
    bias = torch.randn(experts, generator=generator) * 0.3
    bias -= bias.mean()
    cutoff = route(scores, bias, k).cutoff_T
    counts = histogram(scores, cutoff, bias)
    assert (counts.sum(1) == tokens).all()
    found = bias_from_histogram(counts, bias, k, tokens).double()
    # between the q-th and the (q+1)-th smallest r any value lets exactly q tokens in
    r = (cutoff.unsqueeze(1) - scores).double().sort(0).values
    share = -(-tokens * k // experts)
    width = float(bias.max() - bias.min() + 2) / 1000 + 1e-6
    low, high = r[share - 1] - width, r[min(share, tokens - 1)] + width
    # some constant, lost in the centring, puts every expert inside its interval
    assert (low - found).max() <= (high - found).min()


def test_histogram_equals_exact_on_dense_data():
    generator = torch.Generator().manual_seed(3)
    scores = torch.sigmoid(torch.randn(20000, 32, generator=generator))
    bias = torch.linspace(-0.2, 0.2, 32)
    cutoff = route(scores, bias, 4).cutoff_T
    width = (0.4 + 2) / 1000
    found = bias_from_histogram(histogram(scores, cutoff, bias), bias, 4, 20000)
    assert (found - bias_exact(scores, cutoff, 4)).abs().max() < width


def test_integers_are_the_same_for_any_sharding_and_order():
    scores, k = skewed(tokens=1000, experts=40, seed=5), 4
    bias = torch.randn(40) * 0.1
    cutoff = route(scores, bias, k).cutoff_T
    whole = histogram(scores, cutoff, bias)
    order = torch.randperm(1000)
    for shards in (2, 8, 1000):
        parts = order.chunk(shards)
        total = sum(histogram(scores[part], cutoff[part], bias) for part in parts)
        assert torch.equal(total, whole)
    averaged = torch.stack([bias_exact(scores[p], cutoff[p], k) for p in order.chunk(8)]).mean(0)
    assert not torch.equal(averaged, bias_exact(scores, cutoff, k))


def test_padding_is_not_counted():
    scores, bias = torch.rand(30, 6), torch.zeros(6)
    cutoff = route(scores, bias, 2).cutoff_T
    valid = torch.arange(30) < 25
    padded = histogram(scores, cutoff, bias, valid)
    assert torch.equal(padded, histogram(scores[:25], cutoff[:25], bias))
    assert (histogram(scores, cutoff, bias, valid & False) == 0).all()


@pytest.mark.parametrize("update", ["exact", "histogram", "sign"])
def test_mean_is_zero(update):
    scores, bias = skewed(tokens=500, experts=20), torch.zeros(20)
    if update == "sign":
        new = bias_sign(bias + 3, loads(scores, bias, 2), 0.1)
    else:
        new = step(scores, bias, 2, update)
    assert new.dtype == torch.float32 and new.mean().abs() < 1e-7 and new.std() > 0.01


def test_a_popular_expert_is_pushed_down():
    load = torch.tensor([9, 1, 2])
    assert torch.allclose(
        bias_sign(torch.zeros(3), load, 0.1), torch.tensor([-2 / 15, 1 / 15, 1 / 15])
    )
    new = step(TOY, torch.zeros(4), 1)
    assert new.argmin() == 0


def test_edges():
    scores, bias = torch.rand(10, 4), torch.randn(4)
    every = route(scores, bias, 4)
    new = bias_from_histogram(histogram(scores, every.cutoff_T, bias), bias, 4, 10)
    assert new.isfinite().all()
    empty = histogram(scores[:0], every.cutoff_T[:0], bias)
    assert torch.equal(bias_from_histogram(empty, bias, 2, 0), bias)
    assert torch.equal(bias_exact(scores[:0], every.cutoff_T[:0], 2), torch.zeros(4))
    with pytest.raises(ValueError, match="not 11"):
        bias_from_histogram(histogram(scores, every.cutoff_T, bias), bias, 4, 11)
