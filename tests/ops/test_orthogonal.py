"""Newton-Schulz: singular values, per-head balance, parity with torch's Muon."""

import pytest
import torch
from checker import assert_close

from k3.ops.orthogonal import orthogonalize


@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (8, 32, 96), (2, 3, 40, 16), (128, 1024)])
def test_singular_values_of_well_conditioned_blocks(shape):
    o = orthogonalize(torch.randn(shape))
    assert o.shape == shape
    values = torch.linalg.svdvals(o)
    assert values.min() > 0.68 and values.max() < 1.14


def test_singular_vectors_are_kept():
    m = torch.randn(16, 64)
    u, _, v = torch.linalg.svd(m, full_matrices=False)
    core = u.T @ orthogonalize(m) @ v.T
    assert (core - torch.diag(core.diag())).abs().max() < 1e-4


def head_rms(update):
    return update.pow(2).mean((-2, -1)).sqrt() * 512**0.5


def test_heads_of_falling_gradients_get_equal_updates():
    heads = torch.randn(8, 64, 512) * (10.0 ** -(torch.arange(8) / 2)).view(8, 1, 1)
    apart = head_rms(orthogonalize(heads))
    assert apart.max() / apart.min() < 1.02
    whole = head_rms(orthogonalize(heads.reshape(512, 512)).view(8, 64, 512))
    assert whole.max() / whole.min() > 50


def test_scale_does_not_matter_even_where_squares_underflow():
    m = torch.randn(3, 8, 24)
    right = orthogonalize(m)
    for scale in (1e-25, 1e-12, 1e12, 1e25):
        assert_close(f"{scale}", orthogonalize(m * scale), right, rms=1e-4, maximum=1e-3)


def test_zero_matrices_stay_zero_beside_others():
    m = torch.randn(4, 6, 10)
    m[2] = 0
    o = orthogonalize(m)
    assert (o[2] == 0).all() and o.isfinite().all()
    assert_close("beside", o[[0, 1, 3]], orthogonalize(m[[0, 1, 3]]), rms=1e-6)


def test_each_matrix_of_a_batch_is_on_its_own():
    m = torch.randn(5, 12, 7)
    one = torch.stack([orthogonalize(x) for x in m])
    assert_close("batch", orthogonalize(m), one, rms=1e-5, maximum=1e-5)
    nested = orthogonalize(m.unsqueeze(0)).squeeze(0)
    assert torch.equal(nested, orthogonalize(m))


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_parity_with_torch_muon(shape):
    m = torch.randn(shape)
    p = torch.nn.Parameter(torch.zeros(shape))
    p.grad = m.clone()
    muon = torch.optim.Muon([p], lr=1.0, weight_decay=0, momentum=0, nesterov=False)
    muon.step()
    scale = max(1, shape[0] / shape[1]) ** 0.5
    expected = -p.detach() / scale
    # torch iterates in bf16, and small singular values grow by 3.4 a step with their rounding
    assert_close("bf16", orthogonalize(m, dtype=torch.bfloat16), expected, rms=4e-2, maximum=8e-2)
    assert_close("fp32", orthogonalize(m), expected, rms=4e-2, maximum=8e-2)
    assert_close("fp64", orthogonalize(m), orthogonalize(m.double()), rms=1e-5, maximum=1e-4)
    one_more = orthogonalize(m, steps=6)
    assert (one_more - expected).pow(2).mean().sqrt() > 8e-2 * expected.pow(2).mean().sqrt()


def test_types_and_refusal():
    assert orthogonalize(torch.randn(4, 6).bfloat16()).dtype == torch.bfloat16
    assert orthogonalize(torch.randn(0, 4, 6)).shape == (0, 4, 6)
    with pytest.raises(ValueError, match=r"\(5,\)"):
        orthogonalize(torch.randn(5))
