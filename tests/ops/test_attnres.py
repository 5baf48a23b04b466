"""Attention Residuals: the direct mix against its equation, the two phases against it."""

import pytest
import torch
from checker import assert_close
from torch.autograd import gradcheck

from k3.ops import attnres_ref
from k3.ops.attnres import attend_blocks, merge, mix

EPS = 1e-5


def inputs(sources, tokens=7, width=24, scale=1.0, dtype=torch.float32):
    rows = [torch.randn(tokens, width).to(dtype) * 2**i for i in range(sources)]
    return rows, torch.randn(width) * scale, 1 + 0.3 * torch.randn(width)


@pytest.mark.parametrize("sources", [1, 2, 5, 9])
@pytest.mark.parametrize("scale", [0.1, 1, 30])
def test_mix_follows_the_equation(sources, scale):
    rows, query, gamma = inputs(sources, scale=scale)
    expected = attnres_ref.mix(rows, query, gamma, EPS)
    # an fp32 score of size s is off by s * 2^-24, and so is the logarithm of its probability
    limit = 1e-6 * max(1, scale)
    assert_close("mix", mix(rows, query, gamma, EPS), expected, rms=limit, maximum=3 * limit)


def test_wrong_mixes_are_told_apart():
    rows, query, gamma = inputs(4)
    right = attnres_ref.mix(rows, query, gamma, EPS)
    no_gamma = attnres_ref.mix(rows, query, torch.ones_like(gamma), EPS)
    scaled = attnres_ref.mix(rows, query / query.numel() ** 0.5, gamma, EPS)
    keys = torch.stack([r / r.pow(2).mean(-1, keepdim=True).sqrt() for r in rows]).double()
    normed_values = (torch.softmax(keys @ (gamma * query).double(), 0).unsqueeze(-1) * keys).sum(0)
    for wrong in (no_gamma, scaled, normed_values):
        assert (wrong - right).abs().max() > 1e-2


def test_a_zero_query_is_the_plain_mean():
    rows, _, gamma = inputs(6)
    mean = torch.stack(rows).double().mean(0)
    y = mix(rows, torch.zeros_like(gamma), gamma, EPS)
    assert_close("mean", y, mean, rms=1e-6, maximum=1e-6)


def test_one_source_is_itself():
    rows, query, gamma = inputs(1)
    assert_close("self", mix(rows, query, gamma, EPS), rows[0], rms=1e-7, maximum=1e-7)


def test_a_zero_row_is_finite():
    rows, query, gamma = inputs(3)
    rows[1] = torch.zeros_like(rows[1])
    assert_close(
        "zero", mix(rows, query, gamma, EPS), attnres_ref.mix(rows, query, gamma, EPS), rms=2e-6
    )


def test_bf16_sources_with_fp32_statistics():
    rows, query, gamma = inputs(5, tokens=200, width=64, scale=3, dtype=torch.bfloat16)
    y = mix(rows, query.bfloat16(), gamma.bfloat16(), EPS)
    expected = attnres_ref.mix(rows, query.bfloat16(), gamma.bfloat16(), EPS)
    assert y.dtype == torch.bfloat16
    # one rounding of the result is at most 2^-9 relative; rounding keys too costs several times
    error = (y.double() - expected).abs() / expected.abs().clamp(min=0.1)
    assert error.max() < 2**-8
    folded = gamma.bfloat16() * query.bfloat16()
    keys = torch.stack(
        [(r.float() * r.float().pow(2).mean(-1, keepdim=True).rsqrt()).bfloat16() for r in rows]
    )
    rounded = (
        torch.softmax((keys.float() @ folded.float()), 0).unsqueeze(-1) * torch.stack(rows).float()
    )
    wrong = (rounded.sum(0).double() - expected).abs() / expected.abs().clamp(min=0.1)
    assert wrong.max() > 2**-8


def test_gradients_of_every_source_query_and_gamma():
    rows = [torch.randn(4, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    query, gamma = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert gradcheck(lambda q, g, *rows: mix(rows, q, g, EPS), (query, gamma, *rows))


def test_the_same_row_twice_gets_both_gradients():
    row = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    query, gamma = torch.randn(2, 5, dtype=torch.float64)
    assert gradcheck(lambda row: mix([row, 2 * row, row], query, gamma, EPS), (row,))


def test_frozen_query_and_source():
    rows, query, gamma = inputs(3)
    rows[2].requires_grad_()
    (grad,) = torch.autograd.grad(mix(rows, query, gamma, EPS).sum(), rows[2])
    assert grad.isfinite().all() and grad.abs().max() > 0


@pytest.mark.parametrize("blocks", [1, 3, 8])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_two_phases_equal_the_direct_mix(blocks, scale):
    rows, _, _ = inputs(blocks + 1)
    queries, gammas = torch.randn(6, 24) * scale, 1 + 0.3 * torch.randn(6, 24)
    partial = attend_blocks(rows[:-1], queries, gammas, EPS)
    limit = 1e-6 * max(1, scale)
    for i in range(6):
        whole = mix(rows, queries[i], gammas[i], EPS)
        merged = merge(partial, i, rows[-1], queries[i], gammas[i], EPS)
        assert_close("merged", merged, whole, rms=limit, maximum=3 * limit)
        alone = merge(partial, i, None, queries[i], gammas[i], EPS)
        direct = mix(rows[:-1], queries[i], gammas[i], EPS)
        assert_close("phase 1", alone, direct, rms=limit, maximum=3 * limit)
        assert scale != 1 or (merged - alone).abs().max() > 1e-3


def test_two_phases_keep_bf16():
    rows, query, gamma = inputs(4, dtype=torch.bfloat16)
    partial = attend_blocks(rows[:-1], query[None], gamma[None], EPS)
    merged = merge(partial, 0, rows[-1], query, gamma, EPS)
    assert merged.dtype == torch.bfloat16
    assert_close("bf16", merged, mix(rows, query, gamma, EPS), rms=1e-3, maximum=8e-3)


def test_autocast_does_not_narrow_the_scores():
    rows, query, gamma = inputs(4, scale=5)
    plain = mix(rows, query, gamma, EPS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(mix(rows, query, gamma, EPS), plain)


def test_refusals():
    rows, query, gamma = inputs(2)
    with pytest.raises(ValueError, match="at least one"):
        mix([], query, gamma, EPS)
    with pytest.raises(ValueError, match="differ"):
        mix([rows[0], rows[1].double()], query, gamma, EPS)
    with pytest.raises(ValueError, match="do not fit"):
        mix(rows, query[:3], gamma, EPS)
