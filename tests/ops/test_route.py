"""The router's choice: ties, edges, forced routes, refusals, gradients."""

import pytest
import torch
from checker import assert_close
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from k3.ops.route import route


def by_sorting(scores, bias, k):
    """Python's sort on (-biased, index): the specification of ties."""
    biased = (scores + bias).tolist()
    return [sorted(range(len(row)), key=lambda j, row=row: (-row[j], j))[:k] for row in biased]


@given(st.integers(0, 40), st.integers(1, 12), st.data())
def test_choice_with_many_ties(tokens, experts, data):
    k = data.draw(st.integers(1, experts))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    scores = torch.randint(0, 4, (tokens, experts), generator=generator) / 4
    bias = torch.randint(-2, 3, (experts,), generator=generator) / 4
    chosen = route(scores, bias, k)
    assert chosen.indices_Tk.tolist() == by_sorting(scores, bias, k)
    assert chosen.indices_Tk.shape == chosen.weights_Tk.shape == (tokens, k)
    ranked = (scores + bias).sort(-1, descending=True).values
    expected = ranked[:, k] if k < experts else torch.full((tokens,), -torch.inf)
    assert torch.equal(chosen.cutoff_T, expected)


def test_scores_an_ulp_apart_are_no_tie():
    low = torch.tensor(0.5)
    high = torch.nextafter(low, torch.tensor(1.0))
    chosen = route(torch.stack([low, low, high]).unsqueeze(0), torch.zeros(3), 1)
    assert chosen.indices_Tk.tolist() == [[2]]


def test_negative_scores_and_signed_zeros():
    scores = torch.tensor([[-1.0, -0.0, 0.0, -2.0, 3.0]])
    assert route(scores, -torch.zeros(5), 4).indices_Tk.tolist() == [[4, 1, 2, 0]]


def test_bias_selects_but_does_not_weigh():
    scores = torch.tensor([[0.9, 0.5, 0.4, 0.1]])
    chosen = route(scores, torch.tensor([-1.0, 0.0, 0.3, 0.0]), 2)
    assert chosen.indices_Tk.tolist() == [[2, 1]]
    assert_close("weights", chosen.weights_Tk, torch.tensor([[4 / 9, 5 / 9]]), rms=1e-6)
    assert_close("cutoff", chosen.cutoff_T, torch.tensor([0.1]), rms=1e-6)


def test_scale_and_no_renormalisation():
    scores, bias = torch.rand(5, 6), torch.zeros(6)
    plain = route(scores, bias, 3, renormalize=False, scale=2.5)
    assert torch.equal(plain.weights_Tk, scores.gather(1, plain.indices_Tk) * 2.5)
    normed = route(scores, bias, 3, scale=2.5).weights_Tk
    assert_close("sum", normed.sum(-1), torch.full((5,), 2.5), rms=1e-6)


def test_all_scores_zero_give_finite_weights():
    assert torch.equal(route(torch.zeros(2, 4), torch.zeros(4), 2).weights_Tk, torch.zeros(2, 2))


def test_forced_routes_gather_from_the_dense_scores():
    scores = torch.rand(3, 8, requires_grad=True)
    free = route(scores, torch.zeros(8), 2)
    forced = torch.tensor([[5, 1], [0, 7], [3, 2]])
    chosen = route(scores, torch.zeros(8), 2, routes_Tk=forced)
    assert torch.equal(chosen.indices_Tk, forced) and torch.equal(chosen.cutoff_T, free.cutoff_T)
    (grad,) = torch.autograd.grad(chosen.weights_Tk[:, 0].sum(), scores)
    assert (grad.gather(1, forced) != 0).all() and (grad != 0).sum() == 6
    with pytest.raises(ValueError, match=r"\(3, 3\).*\(3, 2\)"):
        route(scores, torch.zeros(8), 2, routes_Tk=forced.new_zeros(3, 3))


def test_gradient_reaches_chosen_scores_only():
    scores = torch.rand(6, 5, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(5, requires_grad=True)
    chosen = route(scores, bias, 2)
    grad, none = torch.autograd.grad(
        (chosen.weights_Tk * torch.randn(6, 2)).sum(), (scores, bias), allow_unused=True
    )
    assert none is None
    assert ((grad != 0).sum(1) == 2).all()
    routes = chosen.indices_Tk
    assert gradcheck(lambda s: route(s, bias, 2, routes_Tk=routes).weights_Tk, (scores,))


def test_a_row_that_is_not_finite_is_named():
    scores = torch.rand(5, 4)
    scores[3, 1] = torch.nan
    scores[4] = torch.inf
    with pytest.raises(ValueError, match="token 3 .*2 such rows"):
        route(scores, torch.zeros(4), 2)
    route(scores, torch.zeros(4), 2, check=False)


def test_a_switched_off_expert_is_allowed():
    bias = torch.tensor([0.0, -torch.inf, 0.0])
    assert (route(torch.rand(20, 3), bias, 2).indices_Tk != 1).all()
    with pytest.raises(ValueError, match="token 0"):
        route(torch.rand(2, 3), torch.tensor([0.0, torch.nan, 0.0]), 2)


@pytest.mark.parametrize("k", [0, 4])
def test_k_out_of_range(k):
    with pytest.raises(ValueError, match=f"1..3 experts, got {k}"):
        route(torch.rand(2, 3), torch.zeros(3), k)
