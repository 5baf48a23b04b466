"""RMSNorm against its formula in fp64, its rounding order, and gradients."""

import pytest
import torch
from checker import assert_close
from torch.autograd import gradcheck

from k3.ops.norm import gated_rms_norm, rms_norm

EPS = 1e-5


def formula(x, weight, eps=EPS):
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("shape", [(7, 96), (3, 4, 16), (0, 8), (1, 1)])
def test_fp32_follows_the_formula(shape):
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    y = rms_norm(x, weight, EPS)
    if y.numel():
        assert_close("y", y, formula(x, weight), rms=1e-6, maximum=2e-6)
    assert y.shape == x.shape


def test_eps_stands_inside_the_root_of_the_mean():
    x, weight = torch.full((2, 128), 1e-3), torch.ones(128)
    expected = formula(x, weight)
    assert_close("y", rms_norm(x, weight, EPS), expected, rms=1e-6, maximum=2e-6)
    outside = x / (x.pow(2).mean(-1, keepdim=True).sqrt() + EPS)
    of_the_sum = x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS) * 128**0.5
    for wrong in (outside, of_the_sum):
        assert (wrong.double() - expected).abs().max() > 0.05


def test_bf16_rounds_before_the_weight():
    x = torch.randn(64, 128).bfloat16()
    weight = torch.randn(128)
    normed = formula(x, torch.ones(128)).float().bfloat16()
    expected = (normed * weight).bfloat16()
    y = rms_norm(x, weight, EPS)
    assert y.dtype == torch.bfloat16
    # one ulp of the normalised value may differ where the fp64 formula sits on a rounding edge
    assert (y == expected).float().mean() > 0.999
    late = (formula(x, weight)).float().bfloat16()
    assert (y != late).any()


def test_gated_norm_is_fp32_inside():
    o, gate, weight = torch.randn(5, 3, 32), torch.randn(5, 3, 32), torch.randn(32)
    expected = formula(o, weight) * torch.sigmoid(gate.double())
    assert_close("y", gated_rms_norm(o, gate, weight, EPS), expected, rms=1e-6, maximum=2e-6)
    narrow = gated_rms_norm(o.bfloat16(), gate.bfloat16(), weight, EPS)
    once = formula(o.bfloat16(), weight) * torch.sigmoid(gate.bfloat16().double())
    assert narrow.dtype == torch.bfloat16
    assert_close("bf16", narrow, once.bfloat16(), rms=1e-4, maximum=8e-3)


def test_gradients():
    x, gate = (torch.randn(4, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x, w: rms_norm(x, w, EPS), (x, weight))
    assert gradcheck(lambda x, g, w: gated_rms_norm(x, g, w, EPS), (x, gate, weight))


def test_gradients_in_mixed_types():
    x = torch.randn(9, 16).bfloat16().requires_grad_()
    weight = torch.randn(16, requires_grad=True)
    dx, dw = torch.autograd.grad(rms_norm(x, weight, EPS).sum(), (x, weight))
    assert dx.dtype == torch.bfloat16 and dw.dtype == torch.float32
    xd, wd = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    ex, ew = torch.autograd.grad(formula(xd, wd).sum(), (xd, wd))
    assert_close("dx", dx, ex, rms=1e-2, maximum=2e-2)
    assert_close("dw", dw, ew, rms=1e-5, maximum=1e-4)


def test_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"\(5,\).*\(2, 4\)"):
        rms_norm(torch.randn(2, 4), torch.ones(5), EPS)
    with pytest.raises(ValueError, match="gate"):
        gated_rms_norm(torch.randn(2, 4), torch.randn(2, 3), torch.ones(4), EPS)
