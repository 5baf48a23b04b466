"""Blocked causal attention against the plain softmax, and the absorbed form over pages."""

import pytest
import torch
from checker import assert_close
from torch.autograd import gradcheck

import k3.ops.mla as mla
from k3.ops.mla import attention, latent_attention, write_rows
from k3.ops.spans import Spans


def plain(q, k, v, spans, scale):
    """Softmax over one whole [T, T] matrix in fp64 with a mask of span and time."""
    q, k, v = q.double(), k.double(), v.double()
    segment, order = spans.segments(), torch.arange(q.shape[0])
    seen = (segment[:, None] == segment[None]) & (order[:, None] >= order[None])
    s = torch.einsum("qhd,khd->hqk", q, k) * scale
    s = s.masked_fill(~seen, -torch.inf)
    o = torch.einsum("hqk,khv->qhv", s.softmax(-1), v)
    valid = spans.valid()
    return o * valid[:, None, None], s[:, valid].flatten(1).amax(1)


def inputs(tokens, heads=2, width=6, value=4, dtype=torch.float32):
    q, k = (torch.randn(tokens, heads, width).to(dtype) for _ in range(2))
    return q, k, torch.randn(tokens, heads, value).to(dtype)


SPANS = [
    Spans.from_lengths([1]),
    Spans.from_lengths([130]),
    Spans.from_lengths([5, 5, 5, 5]),
    Spans.from_lengths([3, 0, 17, 3, 1, 64, 17]),
    Spans.from_lengths([9, 33, 9], padding=7),
]


@pytest.mark.parametrize("spans", SPANS, ids=lambda s: "-".join(map(str, s.lengths)))
def test_forward_and_gradients_equal_the_plain_softmax(spans):
    q, k, v = (x.requires_grad_() for x in inputs(spans.num_tokens))
    o, top = attention(q, k, v, spans, scale=0.3)
    expected, expected_top = plain(q, k, v, spans, 0.3)
    assert o.dtype == top.dtype == torch.float32 and not top.requires_grad
    assert_close("o", o, expected, rms=1e-6, maximum=3e-6)
    assert_close("max", top, expected_top, rms=1e-6, maximum=1e-6)
    weight = torch.randn_like(o)
    grads = torch.autograd.grad((o * weight).sum(), (q, k, v))
    expected_grads = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    for name, grad, right in zip("qkv", grads, expected_grads, strict=True):
        if right.abs().max() > 0:
            assert_close(f"d{name}", grad, right, rms=3e-6, maximum=1e-5)


@pytest.mark.parametrize("elements", [1, 700, 1 << 20])
def test_any_block_size_gives_the_same(elements, monkeypatch):
    monkeypatch.setattr(mla, "BLOCK_ELEMENTS", elements)
    spans = Spans.from_lengths([70, 70, 70, 45])
    q, k, v = (x.requires_grad_() for x in inputs(255))
    o, _ = attention(q, k, v, spans, scale=0.5)
    expected, _ = plain(q, k, v, spans, 0.5)
    assert_close("o", o, expected, rms=1e-6, maximum=3e-6)
    for grad, right in zip(
        torch.autograd.grad(o.square().sum(), (q, k, v)),
        torch.autograd.grad(expected.square().sum(), (q, k, v)),
        strict=True,
    ):
        assert_close("grad", grad, right, rms=3e-6, maximum=1e-5)


def test_gradcheck():
    spans = Spans.from_lengths([3, 3, 4, 0, 2], padding=2)
    q, k, v = (x.requires_grad_() for x in inputs(14, width=3, value=2, dtype=torch.float64))
    assert gradcheck(lambda *x: attention(*x, spans, scale=0.7)[0], (q, k, v))


def test_a_document_alone_is_bit_identical_to_packed_with_others():
    q, k, v = inputs(60)
    packed, _ = attention(q, k, v, Spans.from_lengths([20, 40]), scale=0.3)
    changed = [torch.cat([x[:20] * 0 + 9, x[20:]]) for x in (q, k, v)]
    other, _ = attention(*changed, Spans.from_lengths([20, 40]), scale=0.3)
    assert torch.equal(packed[20:], other[20:])
    alone, _ = attention(q[20:], k[20:], v[20:], Spans.from_lengths([40]), scale=0.3)
    assert_close("alone", packed[20:], alone, rms=1e-6, maximum=1e-6)


def test_padding_neither_counts_nor_leaks():
    q, k, v = inputs(12)
    q[8:], k[8:], v[8:] = 1e3, 1e3, torch.nan
    for x in (q, k, v):
        x.requires_grad_()
    o, top = attention(q, k, v, Spans.from_lengths([8], padding=4), scale=1.0)
    assert top.max() < 1e3 and (o[8:] == 0).all()
    for grad in torch.autograd.grad(o.sum(), (q, k, v)):
        assert grad.isfinite().all() and (grad[8:] == 0).all()


def test_large_logits_are_finite_and_reported():
    q, k, v = inputs(30)
    o, top = attention(q * 300, k * 300, v, Spans.from_lengths([30]), scale=1.0)
    expected, expected_top = plain(q * 300, k * 300, v, Spans.from_lengths([30]), 1.0)
    assert o.isfinite().all() and top.max() > 1e5
    assert_close("max", top, expected_top, rms=1e-6, maximum=1e-6)


def test_no_tokens():
    q, k, v = inputs(0)
    o, top = attention(q, k, v, Spans.from_lengths([]), scale=1.0)
    assert o.shape == (0, 2, 4) and (top == -torch.inf).all()


def test_bf16_inputs_give_an_fp32_output():
    q, k, v = (x.requires_grad_() for x in inputs(50, dtype=torch.bfloat16))
    spans = Spans.from_lengths([20, 30])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, _ = attention(q, k, v, spans, scale=0.3)
    assert o.dtype == torch.float32
    assert_close("o", o, plain(q, k, v, spans, 0.3)[0], rms=1e-6, maximum=3e-6)
    assert all(g.dtype == torch.bfloat16 for g in torch.autograd.grad(o.sum(), (q, k, v)))


def test_refusals():
    q, k, v = inputs(6)
    with pytest.raises(ValueError, match="spans cover 5 tokens, q has 6"):
        attention(q, k, v, Spans.from_lengths([5]), scale=1.0)
    with pytest.raises(ValueError, match="do not fit"):
        attention(q, k[:, :1], v, Spans.from_lengths([6]), scale=1.0)


class Absorbed:
    """The same small MLA computed expanded and absorbed: nope 5, shared 3, value 4, latent 7."""

    heads, nope, shared, value, latent = 3, 5, 3, 4, 7
    scale = 8**-0.5

    def __init__(self, requests, pages=24, page=4, table=8):
        self.up_k = torch.randn(self.heads, self.nope, self.latent)
        self.up_v = torch.randn(self.heads, self.value, self.latent)
        self.pages = torch.full((pages, page, self.latent + self.shared), torch.nan)
        free = torch.randperm(pages)
        self.table = torch.full((requests, table), -1, dtype=torch.int32)
        for n in range(requests):
            own = free[n::requests][:table]
            self.table[n, : own.numel()] = own

    def queries(self, tokens):
        return torch.randn(tokens, self.heads, self.nope + self.shared)

    def rows(self, tokens):
        return torch.randn(tokens, self.latent + self.shared)

    def expanded(self, q, rows, spans):
        c, s = rows[:, : self.latent], rows[:, self.latent :]
        k = torch.einsum("tr,hnr->thn", c, self.up_k)
        k = torch.cat([k, s.unsqueeze(1).expand(-1, self.heads, -1)], -1)
        v = torch.einsum("tr,hvr->thv", c, self.up_v)
        return attention(q, k, v, spans, scale=self.scale)

    def absorbed(self, q, rows, length, spans):
        write_rows(rows, self.pages, self.table, length, spans)
        q_c = torch.einsum("thn,hnr->thr", q[..., : self.nope], self.up_k)
        q_r = torch.cat([q_c, q[..., self.nope :]], -1)
        o, top = latent_attention(
            q_r, self.pages, self.table, length, spans, scale=self.scale, value_dim=self.latent
        )
        return torch.einsum("thr,hvr->thv", o, self.up_v), top


@pytest.mark.parametrize("chunks", [[13], [1] * 13, [4, 1, 8], [5, 8], [12, 1]])
def test_absorbed_over_any_chunking_equals_expanded(chunks):
    m = Absorbed(1)
    q, rows = m.queries(13), m.rows(13)
    expected, expected_top = m.expanded(q, rows, Spans.from_lengths([13]))
    done, parts, tops = 0, [], []
    for size in chunks:
        part = slice(done, done + size)
        length = torch.tensor([done], dtype=torch.int32)
        o, top = m.absorbed(q[part], rows[part], length, Spans.from_lengths([size]))
        parts.append(o)
        tops.append(top)
        done += size
    assert_close("o", torch.cat(parts), expected, rms=3e-6, maximum=1e-5)
    assert_close("max", torch.stack(tops).amax(0), expected_top, rms=1e-5, maximum=1e-5)


def test_requests_of_unequal_length_mix_in_one_call():
    m = Absorbed(4)
    past, new = [0, 1, 17, 5], [3, 1, 1, 6]
    q = [m.queries(p + n) for p, n in zip(past, new, strict=True)]
    rows = [m.rows(p + n) for p, n in zip(past, new, strict=True)]
    zero = torch.zeros(4, dtype=torch.int32)
    filled = torch.cat([r[:p] for r, p in zip(rows, past, strict=True)])
    write_rows(filled, m.pages, m.table, zero, Spans.from_lengths(past))
    tail = [torch.cat([x[p:] for x, p in zip(xs, past, strict=True)]) for xs in (q, rows)]
    spans = Spans.from_lengths(new, padding=2)
    tail = [torch.cat([x, torch.full_like(x[:2], torch.nan)]) for x in tail]
    length, table = torch.tensor([*past, 0], dtype=torch.int32), m.table
    m.table = torch.cat([table, table[:1] * 0 - 1])
    o, _ = m.absorbed(*tail, length, spans)
    assert (o[-2:] == 0).all()
    for n, part in enumerate(o[:-2].split(new)):
        whole, _ = m.expanded(q[n], rows[n], Spans.from_lengths([past[n] + new[n]]))
        assert_close(f"request {n}", part, whole[past[n] :], rms=3e-6, maximum=1e-5)


def test_rows_land_on_their_pages_only():
    pages = torch.zeros(5, 4, 2)
    table = torch.tensor([[3, 1], [0, -1]], dtype=torch.int32)
    rows = torch.arange(1.0, 7).unsqueeze(1).expand(6, 2)
    spans = Spans.from_lengths([3, 1], padding=2)
    write_rows(rows, pages, table, torch.tensor([2, 0], dtype=torch.int32), spans)
    expected = torch.zeros(5, 4)
    expected[3, 2:], expected[1, 0], expected[0, 0] = torch.tensor([1.0, 2.0]), 3, 4
    assert torch.equal(pages[..., 0], expected)


def test_a_position_without_a_page_is_refused():
    pages, table = torch.zeros(2, 4, 3), torch.tensor([[1, -1]], dtype=torch.int32)
    with pytest.raises((IndexError, RuntimeError)):
        write_rows(torch.ones(5, 3), pages, table, torch.zeros(1), Spans.from_lengths([5]))
    with pytest.raises((IndexError, RuntimeError)):
        write_rows(torch.ones(1, 3), pages, table, torch.tensor([8]), Spans.from_lengths([1]))


def test_blocks_of_queries_do_not_change_the_absorbed_form(monkeypatch):
    m = Absorbed(1)
    q, rows = m.queries(11), m.rows(11)
    zero, spans = torch.zeros(1, dtype=torch.int32), Spans.from_lengths([11])
    whole, top = m.absorbed(q, rows, zero, spans)
    monkeypatch.setattr(mla, "BLOCK_ELEMENTS", 100)
    blocked, blocked_top = m.absorbed(q, rows, zero, spans)
    assert_close("o", blocked, whole, rms=1e-6, maximum=1e-6)
    assert_close("max", blocked_top, top, rms=1e-6, maximum=1e-6)
