"""SiTU-GLU at its published test points, its bound, its gradients, and that it is not SwiGLU."""

import pytest
import torch
from checker import assert_close
from torch.autograd import gradcheck

from k3.ops.situ import situ_glu, swiglu


def formula(g, u, beta=4.0, linear_beta=25.0):
    g, u = g.double(), u.double()
    return (
        beta * torch.tanh(g / beta) * torch.sigmoid(g) * linear_beta * torch.tanh(u / linear_beta)
    )


def test_published_points():
    g, u = torch.tensor([0.0, 1.0, 100.0]), torch.tensor([7.0, 1.0, 100.0])
    assert_close("y", situ_glu(g, u), torch.tensor([0.0, 0.7158, 99.93]), rms=1e-4, maximum=1e-4)


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 0.3, 1, 10, 1000])
def test_formula_over_magnitudes(scale):
    g, u = torch.randn(2, 500) * scale
    expected = formula(g, u)
    # relative to each value: a tanh built from a sigmoid would lose the small ones
    error = (situ_glu(g, u).double() - expected).abs() / (expected.abs() + 1e-30)
    assert error.max() < 2e-6
    capped = formula(4 * torch.tanh(g / 4), u)
    if scale >= 1:
        assert (capped - expected).abs().max() > 1e-2, "the sigmoid must take the raw gate"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bound_at_extremes(dtype):
    g = torch.tensor([1e4, -1e4, 1e4, -1e4, 0.0], dtype=dtype)
    u = torch.tensor([1e4, 1e4, -1e4, -1e4, 1e4], dtype=dtype)
    y = situ_glu(g, u)
    assert y.dtype == dtype and y.isfinite().all() and y.abs().max() <= 100


def test_first_order_of_swiglu_but_not_swiglu():
    g, u = torch.randn(2, 100)
    assert_close("small", situ_glu(g * 1e-2, u * 1e-2), swiglu(g * 1e-2, u * 1e-2), rms=1e-5)
    assert (situ_glu(4 * g, u) - swiglu(4 * g, u)).abs().max() > 1
    assert_close("swiglu", swiglu(g, u), torch.nn.functional.silu(g) * u, rms=1e-6, maximum=1e-6)


@pytest.mark.parametrize("op", [situ_glu, swiglu])
def test_gradients(op):
    g, u = (torch.randn(20, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert gradcheck(lambda g, u: op(g * 6, u * 40), (g, u))


@pytest.mark.parametrize("op", [situ_glu, swiglu])
def test_gradients_are_finite_at_extremes(op):
    g, u = (torch.tensor([1e4, -1e4, 0.0, 1e-30], requires_grad=True) for _ in range(2))
    assert all(x.isfinite().all() for x in torch.autograd.grad(op(g, u).sum(), (g, u)))


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="one shape"):
        situ_glu(torch.zeros(2, 3), torch.zeros(3))
