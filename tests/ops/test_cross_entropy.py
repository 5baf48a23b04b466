"""The fused head and loss against torch's cross entropy."""

import pytest
import torch
import torch.nn.functional as F
from checker import assert_close
from torch.autograd import gradcheck

from k3.ops.cross_entropy import linear_cross_entropy


def inputs(rows=37, width=12, vocabulary=50, ignored=0.3):
    h, weight = torch.randn(rows, width) * 2, torch.randn(vocabulary, width)
    targets = torch.randint(0, vocabulary, (rows,))
    targets[torch.rand(rows) < ignored] = -100
    return h.requires_grad_(), weight.requires_grad_(), targets


@pytest.mark.parametrize("chunk", [None, 1, 7, 37, 1000])
@pytest.mark.parametrize("ignored", [0.0, 0.3])
def test_loss_and_gradients(chunk, ignored):
    h, weight, targets = inputs(ignored=ignored)
    loss = linear_cross_entropy(h, weight, targets, chunk=chunk)
    logits = h.double() @ weight.double().T
    expected = F.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert_close("loss", loss, expected, rms=1e-6)
    # a factor behind the loss, such as 1 / tokens, must reach the stored gradients
    grads = torch.autograd.grad(loss * 0.37, (h, weight))
    expected_grads = torch.autograd.grad(expected * 0.37, (h, weight))
    for name, grad, right in zip(("h", "weight"), grads, expected_grads, strict=True):
        assert_close(f"d{name}", grad, right, rms=1e-6, maximum=1e-5)
    assert (grads[0][targets == -100] == 0).all()


@pytest.mark.parametrize("rows", [0, 5])
def test_nothing_to_learn(rows):
    h, weight, targets = inputs(rows=rows)
    loss = linear_cross_entropy(h, weight, targets.fill_(-100))
    assert loss == 0
    for grad in torch.autograd.grad(loss, (h, weight)):
        assert (grad == 0).all()


def test_gradcheck_and_one_sided_gradients():
    h, weight, targets = inputs(rows=5, width=3, vocabulary=7)
    h, weight = h.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    assert gradcheck(lambda h, w: linear_cross_entropy(h, w, targets, chunk=2), (h, weight))
    for frozen_h, frozen_w in ((True, False), (False, True)):
        a = h.detach().requires_grad_(not frozen_h)
        b = weight.detach().requires_grad_(not frozen_w)
        (grad,) = torch.autograd.grad(linear_cross_entropy(a, b, targets), b if frozen_h else a)
        whole = torch.autograd.grad(linear_cross_entropy(h, weight, targets), (h, weight))
        assert_close("grad", grad, whole[1 if frozen_h else 0], rms=1e-12)


def test_no_gradient_mode_and_other_ignore_index():
    h, weight, targets = inputs(ignored=0)
    targets[:3] = 7
    with torch.no_grad():
        loss = linear_cross_entropy(h, weight, targets, ignore_index=7)
        expected = F.cross_entropy(h @ weight.T, targets, reduction="sum", ignore_index=7)
    assert_close("loss", loss, expected, rms=1e-6)


def test_large_logits_do_not_overflow():
    h, weight, targets = inputs()
    loss = linear_cross_entropy(h * 1e3, weight, targets)
    assert loss.isfinite()
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (h, weight)))


def test_bf16_inputs_keep_an_fp32_loss_and_fp32_sums():
    h, weight, targets = inputs(rows=200)
    narrow = [t.detach().bfloat16().requires_grad_() for t in (h, weight)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(*narrow, targets, chunk=3)
    logits = narrow[0].double() @ narrow[1].double().T
    expected = F.cross_entropy(logits, targets, reduction="sum")
    assert_close("loss", loss, expected, rms=1e-6)
    grads = torch.autograd.grad(loss, narrow)
    for grad, right in zip(grads, torch.autograd.grad(expected, narrow), strict=True):
        assert grad.dtype == torch.bfloat16
        assert_close("grad", grad, right, rms=3e-3, maximum=8e-3)


def test_refusals():
    h, weight, targets = inputs()
    targets[4] = 50
    with pytest.raises(ValueError, match="target 50 is outside the vocabulary of 50"):
        linear_cross_entropy(h, weight, targets)
    targets[4] = -3
    with pytest.raises(ValueError, match="target -3"):
        linear_cross_entropy(h, weight, targets)
    with pytest.raises(ValueError, match="do not fit"):
        linear_cross_entropy(h, weight, targets[:5])
