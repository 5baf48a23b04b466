"""The ops on CUDA: equal to the CPU in fp32, within rounding in bf16, same integers, no poison."""

import pytest
import torch
from checker import assert_close

from k3.ops.attnres import attend_blocks, merge, mix
from k3.ops.cross_entropy import linear_cross_entropy
from k3.ops.experts import experts, grouped_linear
from k3.ops.mla import attention, latent_attention, write_rows
from k3.ops.mx import pack_mxfp4, quantize_mxfp4, quantize_mxfp8
from k3.ops.norm import gated_rms_norm, rms_norm
from k3.ops.orthogonal import orthogonalize
from k3.ops.quantile import bias_exact, bias_from_histogram, histogram
from k3.ops.route import route
from k3.ops.sample import sample, uniform_bits
from k3.ops.situ import situ_glu
from k3.ops.spans import Spans

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_both(op, leaves, dtype, rms):
    """Output and gradients of `op` on CUDA in `dtype` against fp64 on the CPU, same values."""
    narrow = [leaf.cuda().to(dtype).requires_grad_() for leaf in leaves]
    wide = [leaf.detach().cpu().double().requires_grad_() for leaf in narrow]
    y, expected = op(*narrow), op(*wide)
    assert_close("y", y, expected, rms=rms)
    weight = torch.randn(expected.shape, dtype=torch.float64)
    grads = torch.autograd.grad((y * weight.to(y)).sum(), narrow)
    right = torch.autograd.grad((expected * weight).sum(), wide)
    for i, (grad, e) in enumerate(zip(grads, right, strict=True)):
        assert_close(f"gradient {i}", grad, e, rms=2 * rms)


# one rounding of bf16 is 2^-9; an op that rounds two operands and its result stays within three
TYPES = [(torch.float32, 1e-5), (torch.bfloat16, 8e-3)]


@pytest.mark.parametrize(("dtype", "rms"), TYPES)
def test_elementwise_ops(dtype, rms):
    x, gate, weight = torch.randn(2, 65, 96).unbind() + (torch.randn(96),)
    on_both(lambda x, w: rms_norm(x, w, 1e-5), [x, weight], dtype, rms)
    on_both(lambda x, g, w: gated_rms_norm(x, g, w, 1e-5), [x, gate, weight], dtype, rms)
    on_both(situ_glu, [x * 3, gate * 10], dtype, rms)


@pytest.mark.parametrize(("dtype", "rms"), TYPES)
def test_attention_residuals(dtype, rms):
    rows = [torch.randn(70, 96) for _ in range(4)]
    query, gamma = torch.randn(96) * 0.3, torch.ones(96)
    on_both(lambda q, g, *rows: mix(rows, q, g, 1e-5), [query, gamma, *rows], dtype, 3 * rms)
    cuda = [row.cuda().to(dtype) for row in rows]
    partial = attend_blocks(cuda[:-1], query.cuda()[None], gamma.cuda()[None], 1e-5)
    merged = merge(partial, 0, cuda[-1], query.cuda(), gamma.cuda(), 1e-5)
    assert_close("phases", merged, mix(cuda, query.cuda(), gamma.cuda(), 1e-5), rms=rms)


@pytest.mark.parametrize(("dtype", "rms"), TYPES)
def test_attention(dtype, rms):
    lengths, padding = [130, 64, 64, 700, 1], 9
    spans = Spans.from_lengths(lengths, padding=padding)
    q, k = torch.randn(2, spans.num_tokens, 3, 24)
    v = torch.randn(spans.num_tokens, 3, 16)
    on_both(lambda q, k, v: attention(q, k, v, spans, scale=0.2)[0], [q, k, v], dtype, 2 * rms)
    o, top = attention(*(x.cuda().to(dtype) for x in (q, k, v)), spans, scale=0.2)
    assert o.dtype == top.dtype == torch.float32
    _, right = attention(q.to(dtype), k.to(dtype), v.to(dtype), spans, scale=0.2)
    assert_close("max logit", top, right, rms=1e-5)


@pytest.mark.parametrize(("dtype", "rms"), TYPES)
def test_latent_attention(dtype, rms):
    spans = Spans.from_lengths([1, 5, 1])
    table = torch.tensor([[3, 1], [0, -1], [2, -1]], dtype=torch.int32)
    length = torch.tensor([9, 2, 0], dtype=torch.int32)
    rows, q = torch.randn(7, 24).to(dtype), torch.randn(7, 2, 24).to(dtype)
    found = []
    for device in ("cpu", "cuda"):
        pages = torch.linspace(-1, 1, 4 * 8 * 24).view(4, 8, 24).to(device, dtype)
        args = table.to(device), length.to(device), spans.to(device)
        write_rows(rows.to(device), pages, *args)
        found.append(latent_attention(q.to(device), pages, *args, scale=0.2, value_dim=16))
    assert_close("o", found[1][0], found[0][0], rms=rms)
    assert_close("max", found[1][1], found[0][1], rms=1e-5)


@pytest.mark.parametrize(("dtype", "rms"), TYPES)
@pytest.mark.parametrize("width", [32, 20])
def test_experts_with_idle_ones(dtype, rms, width):
    count = 8
    indices = torch.stack([torch.randperm(5)[:2] + 1 for _ in range(200)])
    leaves = [torch.randn(200, 64), torch.rand(200, 2)]
    leaves += [torch.randn(count, width, 64) / 8 for _ in range(2)]
    leaves += [torch.randn(count, 64, width) / 6]

    def op(x, p, w1, w3, w2):
        return experts(x, indices.to(x.device), p, w1, w3, w2, situ_glu)

    on_both(op, leaves, dtype, 2 * rms)


def test_idle_experts_get_zero_gradients_from_poisoned_memory():
    x = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(16, 64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    counts = torch.zeros(16, dtype=torch.int64, device="cuda")
    counts[3], counts[9] = 40, 24
    poison = [torch.full_like(weight, torch.nan) for _ in range(8)]
    del poison
    (y,) = grouped_linear(x, counts, weight)
    _, grad = torch.autograd.grad(y.sum(), (x, weight))
    assert grad.isfinite().all() and (grad[counts == 0] == 0).all()


def test_experts_without_tokens():
    x = torch.zeros(0, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ws = [torch.randn(4, 64, 64, device="cuda", requires_grad=True) for _ in range(3)]
    none = torch.zeros(0, 2, dtype=torch.int64, device="cuda")
    u = experts(x, none, torch.zeros(0, 2, device="cuda"), *ws, situ_glu)
    for grad in torch.autograd.grad(u.sum(), (x, *ws)):
        assert (grad == 0).all()


@pytest.mark.parametrize(("dtype", "rms"), TYPES)
def test_head_and_loss(dtype, rms):
    targets = torch.randint(0, 300, (90,))
    targets[::4] = -100

    def op(h, w):
        return linear_cross_entropy(h, w, targets.to(h.device), chunk=17)

    on_both(op, [torch.randn(90, 64), torch.randn(300, 64) / 4], dtype, rms)


def test_integers_and_choices_equal_the_cpu():
    scores, bias = torch.rand(500, 64), torch.randn(64) * 0.1
    scores[:, 5] = scores[:, 9] = 0.5
    chosen, cuda = route(scores, bias, 6), route(scores.cuda(), bias.cuda(), 6)
    assert torch.equal(cuda.indices_Tk.cpu(), chosen.indices_Tk)
    assert torch.equal(cuda.cutoff_T.cpu(), chosen.cutoff_T)
    counts = histogram(scores, chosen.cutoff_T, bias)
    on_cuda = histogram(scores.cuda(), cuda.cutoff_T, bias.cuda())
    assert torch.equal(on_cuda.cpu(), counts)
    new = bias_from_histogram(on_cuda, bias.cuda(), 6, 500)
    assert_close("bias", new, bias_from_histogram(counts, bias, 6, 500), rms=1e-6)
    exact = bias_exact(scores.cuda(), cuda.cutoff_T, 6)
    assert_close("exact", exact, bias_exact(scores, chosen.cutoff_T, 6), rms=1e-6)


def test_sampling_equals_the_cpu():
    logits = torch.randn(400, 1000) * 3
    keys = {"seed_N": torch.arange(400) * 3 - 50, "position_N": torch.arange(400) + 2**35}
    bits = uniform_bits(keys["seed_N"].cuda(), keys["position_N"].cuda())
    assert torch.equal(bits.cpu(), uniform_bits(keys["seed_N"], keys["position_N"]))
    cuda_keys = {name: value.cuda() for name, value in keys.items()}
    for options in ({}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 5}, {"temperature": 0}):
        ids, logp = sample(logits, **keys, **options)
        cuda_ids, cuda_logp = sample(logits.cuda(), **cuda_keys, **options)
        assert torch.equal(cuda_ids.cpu(), ids)
        assert_close("logp", cuda_logp, logp, rms=1e-5)


def test_formats_equal_the_cpu():
    w = torch.randn(16, 128) * 10 ** torch.empty(16, 128).uniform_(-6, 6)
    for ours, right in zip(pack_mxfp4(w.cuda()), pack_mxfp4(w), strict=True):
        assert torch.equal(ours.cpu(), right)
    for quantize in (quantize_mxfp4, quantize_mxfp8):
        assert torch.equal(quantize(w.cuda()).cpu(), quantize(w))


def test_orthogonalisation_in_bf16():
    m = torch.randn(4, 64, 256)
    values = torch.linalg.svdvals(orthogonalize(m.cuda()).float().cpu())
    assert values.min() > 0.6 and values.max() < 1.25
    wide = orthogonalize(m.cuda(), dtype=torch.float32)
    assert_close("fp32", wide, orthogonalize(m.double()), rms=1e-4, maximum=1e-3)
