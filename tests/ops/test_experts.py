"""Routed experts against a loop over tokens, at every odd load, with hooks and gradients."""

import pytest
import torch
from checker import assert_close
from torch.autograd import gradcheck

from k3.ops.experts import combine, experts, gather, sort_by_expert
from k3.ops.situ import situ_glu, swiglu


def weights(count, width=8, latent=6, dtype=torch.float32):
    w1, w3 = (torch.randn(count, width, latent, dtype=dtype) for _ in range(2))
    return w1, w3, torch.randn(count, latent, width, dtype=dtype)


def by_token(x, indices, p, w1, w3, w2, glu=situ_glu):
    """u_t = sum_j p_tj w2 glu(w1 x_t, w3 x_t), one token and one choice at a time, in fp64."""
    x, p, w1, w3, w2 = (t.double() for t in (x, p, w1, w3, w2))
    rows = []
    for t in range(x.shape[0]):
        u = torch.zeros_like(x[t])
        for j, e in enumerate(indices[t].tolist()):
            u = u + p[t, j] * (w2[e] @ glu(w1[e] @ x[t], w3[e] @ x[t]))
        rows.append(u)
    return torch.stack(rows) if rows else x


def routes(kind, tokens, k, count):
    if kind == "one expert takes all":
        return torch.arange(k).expand(tokens, k) + count - k
    if kind == "half idle":
        return torch.stack([torch.randperm(count // 2)[:k] for _ in range(tokens)])
    return torch.stack([torch.randperm(count)[:k] for _ in range(tokens)])


KINDS = ["spread", "half idle", "one expert takes all"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "k"), [(1, 1), (13, 1), (37, 3)])
def test_equals_the_loop_over_tokens(kind, tokens, k):
    count = 8
    leaves = [torch.randn(tokens, 6), torch.rand(tokens, k), *weights(count)]
    for leaf in leaves:
        leaf.requires_grad_()
    x, p, w1, w3, w2 = leaves
    indices = routes(kind, tokens, k, count)
    u = experts(x, indices, p, w1, w3, w2, situ_glu)
    expected = by_token(x, indices, p, w1, w3, w2)
    assert_close("u", u, expected, rms=1e-6, maximum=5e-6)
    weight = torch.randn_like(u)
    grads = torch.autograd.grad((u * weight).sum(), leaves)
    expected_grads = torch.autograd.grad((expected * weight).sum(), leaves)
    for name, grad, right in zip(["x", "p", "w1", "w3", "w2"], grads, expected_grads, strict=True):
        assert_close(f"d{name}", grad, right, rms=3e-6, maximum=1e-5)
    idle = torch.bincount(indices.flatten(), minlength=count) == 0
    for grad in grads[2:]:
        assert (grad[idle] == 0).all()


def test_no_tokens():
    leaves = [torch.randn(0, 6), torch.rand(0, 2), *weights(4)]
    for leaf in leaves:
        leaf.requires_grad_()
    x, p, w1, w3, w2 = leaves
    u = experts(x, torch.zeros(0, 2, dtype=torch.int64), p, w1, w3, w2, situ_glu)
    assert u.shape == (0, 6)
    for leaf, grad in zip(leaves, torch.autograd.grad(u.sum(), leaves), strict=True):
        assert grad.shape == leaf.shape and (grad == 0).all()


def test_gradcheck():
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    p = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    ws = [w.requires_grad_() for w in weights(4, width=4, latent=3, dtype=torch.float64)]
    indices = routes("half idle", 5, 2, 4)
    assert gradcheck(lambda x, p, *ws: experts(x, indices, p, *ws, swiglu), (x, p, *ws))


def test_tokens_in_any_order_and_choices_in_any_order():
    x, p, ws = torch.randn(20, 6), torch.rand(20, 3), weights(5)
    indices = routes("spread", 20, 3, 5)
    u = experts(x, indices, p, *ws, situ_glu)
    order = torch.randperm(20)
    shuffled = experts(x[order], indices[order], p[order], *ws, situ_glu)
    assert_close("tokens", shuffled, u[order], rms=1e-6, maximum=1e-6)
    flipped = experts(x, indices.flip(1), p.flip(1), *ws, situ_glu)
    assert_close("choices", flipped, u, rms=1e-6, maximum=1e-6)


def test_sorting_is_stable_and_counted():
    indices = torch.tensor([[2, 0], [0, 2], [0, 1]])
    order, place, counts = sort_by_expert(indices, 4)
    assert order.tolist() == [1, 2, 4, 5, 0, 3] and counts.tolist() == [3, 1, 2, 0]
    assert torch.equal(order[place.flatten()], torch.arange(6))


def test_the_sum_runs_in_fp32():
    x = torch.randn(64, 32).bfloat16()
    p = torch.softmax(torch.randn(64, 4), -1)
    ws = [w.bfloat16() for w in weights(8, width=32, latent=32)]
    indices = routes("spread", 64, 4, 8)
    u = experts(x, indices, p, *ws, situ_glu)
    assert u.dtype == torch.bfloat16
    order, place, _ = sort_by_expert(indices, 8)
    y = gather(x, order, place)
    fp32 = (y[place].float() * p.unsqueeze(-1)).sum(1)
    right = combine(y, p, order, place, torch.float32)
    assert_close("fp32", right, fp32, rms=1e-6, maximum=1e-6)
    narrow = sum((y[place[:, j]] * p[:, j : j + 1].bfloat16()) for j in range(4))
    assert (narrow.float() - fp32).abs().max() > 1e-3


def test_quantiser_sees_weights_and_activations_before_each_product():
    seen = []

    def quant(tensor, kind):
        seen.append((kind, tuple(tensor.shape)))
        return tensor.round()

    x, p, ws = torch.randn(7, 6), torch.rand(7, 2), weights(3)
    indices = routes("spread", 7, 2, 3)
    u = experts(x, indices, p, *ws, lambda g, u: swiglu(g, u).round(), quant=quant)
    expected = by_token(
        x.round(), indices, p, *(w.round() for w in ws), lambda g, u: swiglu(g, u).round()
    )
    assert_close("u", u, expected, rms=1e-5, maximum=1e-5)
    assert sorted(kind for kind, _ in seen) == ["activation"] * 2 + ["weight"] * 3
    assert ("activation", (14, 6)) in seen and ("activation", (14, 8)) in seen


def test_dispatch_replaces_the_permutation():
    x, p, ws = torch.randn(9, 6), torch.rand(9, 2), weights(4)
    indices = routes("spread", 9, 2, 4)

    def dispatch(x_Tl, indices_Tk, weights_Tk, compute):
        """Every expert by itself, as if each lived on a rank of its own."""
        u = torch.zeros_like(x_Tl)
        for e in range(4):
            token, slot = (indices_Tk == e).nonzero().unbind(1)
            counts = torch.zeros(4, dtype=torch.int64)
            counts[e] = token.numel()
            y = compute(x_Tl[token], counts)
            u = u.index_add(0, token, y * weights_Tk[token, slot].unsqueeze(1))
        return u

    local = experts(x, indices, p, *ws, situ_glu)
    sent = experts(x, indices, p, *ws, situ_glu, dispatch=dispatch)
    assert_close("dispatch", sent, local, rms=1e-6, maximum=1e-6)


def test_refusals():
    x, p, (w1, w3, w2) = torch.randn(3, 6), torch.rand(3, 2), weights(4)
    indices = routes("spread", 3, 2, 4)
    with pytest.raises(ValueError, match="w2"):
        experts(x, indices, p, w1, w3, w1, situ_glu)
    with pytest.raises(ValueError, match="w3"):
        experts(x, indices, p, w1, w2, w2, situ_glu)
    with pytest.raises(ValueError, match="indices"):
        experts(x, indices[:2], p, w1, w3, w2, situ_glu)
