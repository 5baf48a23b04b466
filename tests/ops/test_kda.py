"""KDA: chunks against the fp64 recurrence at every length and split, gates at both extremes,
packing, causality.
"""

from __future__ import annotations

import pytest
import torch
from checker import assert_close
from torch import Tensor

from k3.ops.conv import short_conv
from k3.ops.kda import kda, kda_decode
from k3.ops.kda_ref import decay, kda_ref, l2norm
from k3.ops.spans import Spans

NAMES = ("q", "k", "v", "z", "b", "A_log", "dt_bias", "S")
HEADS, WIDTH, VALUES = 2, 8, 12
# A_log has one entry per head: a sum over all tokens and channels whose terms cancel, relative to
# the few that remain.
LOOSER = {"A_log": 10.0}
SHIFTS = {"usual": (0.0, 1.0), "no decay": (-14.0, 1.0), "floor": (14.0, 1.0), "mixed": (0.0, 12.0)}


def draw(
    lengths: list[int], gates: str = "usual", dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths) * 7 + len(lengths))
    T = sum(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shift, spread = SHIFTS[gates]
    tensors = [
        normal(T, HEADS, WIDTH),
        normal(T, HEADS, WIDTH),
        normal(T, HEADS, VALUES),
        normal(T, HEADS, WIDTH) * spread + shift,
        normal(T, HEADS),
        normal(HEADS) * 0.3,
        normal(HEADS, WIDTH) * 0.3,
        normal(len(lengths), HEADS, WIDTH, VALUES) * 0.3,
    ]
    return [x.to(dtype).requires_grad_() for x in tensors]


def run(op, inputs: list[Tensor], lengths: list[int], bound: float | None) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    spans = Spans.from_lengths(lengths)
    return op(*inputs[:7], spans, lower_bound=bound, initial_state_NHKV=inputs[7])


def gradients(outputs: tuple[Tensor, Tensor], inputs: list[Tensor], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in outputs]
    total = sum((x * w.to(x.dtype)).sum() for x, w in zip(outputs, weights, strict=True))
    return list(torch.autograd.grad(total, inputs))


def compare(
    lengths: list[int], gates: str, dtype: torch.dtype, bound: float | None, rms: float
) -> None:
    ours = draw(lengths, gates, dtype)
    exact = [x.detach().double().requires_grad_() for x in ours]
    result, expected = run(kda, ours, lengths, bound), run(kda_ref, exact, lengths, bound)
    where = f"{lengths} {gates} {bound}"
    assert_close(f"o {where}", result[0], expected[0], rms)
    assert_close(f"state {where}", result[1], expected[1], rms)
    pairs = zip(NAMES, gradients(result, ours), gradients(expected, exact), strict=True)
    for name, actual, wanted in pairs:
        assert_close(f"d{name} {where}", actual, wanted, rms * LOOSER.get(name, 1.0))


@pytest.mark.parametrize("bound", [-5.0, None])
def test_every_length_forward_and_backward(bound: float | None) -> None:
    for length in range(1, 131):
        compare([length], "usual", torch.float32, bound, 1e-5)


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("gates", SHIFTS)
def test_gates_at_both_extremes(gates: str, bound: float | None) -> None:
    for lengths in ([1], [15], [16], [17], [31], [32], [33], [65], [130], [20, 0, 1, 37, 64]):
        compare(lengths, gates, torch.float32, bound, 1e-5)


@pytest.mark.parametrize("gates", SHIFTS)
def test_fp64_equals_the_oracle(gates: str) -> None:
    for lengths in ([33], [64], [5, 0, 70]):
        # The oracle's own sigmoid has lost eight digits of its slope at the floor.
        compare(lengths, gates, torch.float64, -5.0, 1e-10 if gates != "floor" else 1e-8)


@pytest.mark.parametrize("gates", SHIFTS)
def test_bf16_inputs(gates: str) -> None:
    # Outputs and gradients are rounded to bf16; what is checked is that the arithmetic in between
    # is not.
    compare([130], gates, torch.bfloat16, -5.0, 5e-3)


@pytest.mark.parametrize("length", [7, 33, 66])
def test_every_split_with_carried_state(length: int) -> None:
    inputs = draw([length])
    whole = run(kda_ref, inputs, [length], -5.0)
    wanted = gradients(whole, inputs)
    for cut in range(length + 1):
        ours = [x.detach().float().requires_grad_() for x in inputs]
        first = [*(x[:cut] for x in ours[:5]), *ours[5:]]
        o1, state = run(kda, first, [cut], -5.0)
        second = [*(x[cut:] for x in ours[:5]), *ours[5:7], state]
        o2, final = run(kda, second, [length - cut], -5.0)
        joined = (torch.cat([o1, o2]), final)
        assert_close(f"o cut at {cut}", joined[0], whole[0])
        assert_close(f"state cut at {cut}", final, whole[1])
        for name, actual, expected in zip(NAMES, gradients(joined, ours), wanted, strict=True):
            limit = 1e-5 * LOOSER.get(name, 1.0)
            assert_close(f"d{name} cut at {cut}", actual, expected, limit)


@pytest.mark.slow
def test_every_split_of_every_length() -> None:
    for length in range(1, 131):
        test_every_split_with_carried_state(length)


@pytest.mark.parametrize("bound", [-5.0, None])
def test_packed_documents_equal_each_alone(bound: float | None) -> None:
    lengths = [37, 51, 1, 40]
    inputs = draw(lengths, dtype=torch.float32)
    packed, states = run(kda, inputs, lengths, bound)
    start = 0
    for n, length in enumerate(lengths):
        rows = slice(start, start + length)
        alone = [*(x[rows] for x in inputs[:5]), *inputs[5:7], inputs[7][n : n + 1]]
        o, state = run(kda, alone, [length], bound)
        assert_close("alone", o, packed[rows], 1e-6)
        assert_close("state alone", state[0], states[n], 1e-6)
        start += length


def test_changing_one_document_leaves_the_others_bit_identical() -> None:
    lengths = [37, 51, 40]
    inputs = draw(lengths, dtype=torch.float32)
    before, states = run(kda, inputs, lengths, -5.0)
    changed = [x.detach().clone() for x in inputs]
    for x in changed[:5]:
        x[36] += 1.0
    after, new_states = run(kda, changed, lengths, -5.0)
    assert torch.equal(before[37:], after[37:]) and torch.equal(states[1:], new_states[1:])
    assert not torch.equal(before[36], after[36])


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("at", [0, 5, 16, 20, 33, 44])
def test_a_later_gate_changes_nothing_earlier(at: int, bound: float | None) -> None:
    inputs = draw([45], "mixed", torch.float32)
    before, _ = run(kda, inputs, [45], bound)
    changed = [x.detach().clone() for x in inputs]
    changed[3][at:] = 20.0
    after, _ = run(kda, changed, [45], bound)
    # A chunk's exponents are centred on its middle row, so a later gate may move earlier rows by
    # rounding alone.
    if at:
        assert_close("earlier rows", after[:at], before[:at], 5e-6)
    (dz,) = torch.autograd.grad(before[: at + 1].sum(), inputs[3])
    assert torch.equal(dz[at + 1 :], torch.zeros_like(dz[at + 1 :]))


def test_decode_continues_a_prefill_token_by_token() -> None:
    for prompt in (1, 2, 3, 40):
        inputs = [x.detach() for x in draw([prompt + 5], dtype=torch.float32)]
        spans = Spans.from_lengths([prompt + 5])
        whole, final = kda(*inputs[:7], spans, initial_state_NHKV=inputs[7])
        pool = torch.full((3, HEADS, WIDTH, VALUES), 7.0)
        pool[2] = inputs[7][0]
        slot, outs = torch.tensor([2], dtype=torch.int32), []
        for start, stop in [(0, prompt), *((t, t + 1) for t in range(prompt, prompt + 5))]:
            step = [x[start:stop] for x in inputs[:5]]
            new = Spans.from_lengths([stop - start])
            outs.append(kda_decode(*step, *inputs[5:7], new, pool, slot))
        assert_close("decode", torch.cat(outs), whole)
        assert_close("pool", pool[2], final[0])
        assert torch.equal(pool[:2], torch.full_like(pool[:2], 7.0))


def test_decode_skips_negative_slots_and_mixed_lengths() -> None:
    lengths = [2, 0, 1, 4]
    inputs = [x.detach() for x in draw(lengths, dtype=torch.float32)]
    spans = Spans.from_lengths(lengths)
    whole, final = kda(*inputs[:7], spans, initial_state_NHKV=inputs[7])
    pool = torch.zeros(5, HEADS, WIDTH, VALUES)
    pool[[4, 0, 1]] = inputs[7][[0, 1, 3]]
    before = pool.clone()
    slot = torch.tensor([4, 0, -1, 1], dtype=torch.int32)
    o = kda_decode(*inputs[:7], spans, pool, slot)
    assert_close("o", o[[0, 1, 3, 4, 5, 6]], whole[[0, 1, 3, 4, 5, 6]])
    assert torch.equal(o[2], torch.zeros_like(o[2]))
    assert_close("pool", pool[[4, 0, 1]], final[[0, 1, 3]])
    assert torch.equal(pool[[2, 3]], before[[2, 3]])


def test_saturated_gates_are_exact_and_have_finite_gradients() -> None:
    z = torch.full((1, 1, 4), -200.0, requires_grad=True)
    A = torch.full((1,), 100.0, requires_grad=True)
    bias = torch.zeros(1, 4, requires_grad=True)
    for bound in (-5.0, None):
        g = decay(z, A, bias, bound)
        assert torch.equal(g.exp(), torch.ones_like(g))
        spans = Spans.from_lengths([1])
        x = torch.ones(1, 1, 4)
        o, _ = kda(x, x, x, z, torch.zeros(1, 1), A, bias, spans, lower_bound=bound)
        for grad in torch.autograd.grad(o.sum(), (z, A, bias)):
            assert torch.isfinite(grad).all()


@pytest.mark.parametrize("raw", [5.0, -20.0])
def test_a_chunk_of_equal_raw_gates_in_bf16_is_finite(raw: float) -> None:
    inputs = draw([64], dtype=torch.bfloat16)
    with torch.no_grad():
        inputs[3].fill_(raw)
    exact = [x.detach().double() for x in inputs]
    assert_close("bf16", run(kda, inputs, [64], -5.0)[0], run(kda_ref, exact, [64], -5.0)[0], 5e-3)


def test_zero_tokens_and_zero_vectors() -> None:
    inputs = draw([0, 0], dtype=torch.float32)
    o, state = run(kda, inputs, [0, 0], -5.0)
    assert o.shape == (0, HEADS, VALUES) and torch.equal(state, inputs[7])
    inputs = draw([3], dtype=torch.float32)
    with torch.no_grad():
        inputs[0].zero_()
        inputs[1].zero_()
    for grad in gradients(run(kda, inputs, [3], -5.0), inputs):
        assert torch.isfinite(grad).all()


def test_shapes_and_bounds_are_checked() -> None:
    inputs = draw([4])
    with pytest.raises(ValueError, match="shapes"):
        kda(*inputs[:7], Spans.from_lengths([3]))
    with pytest.raises(ValueError, match="lower_bound"):
        kda(*inputs[:7], Spans.from_lengths([4]), lower_bound=-6.0)


def _wrong(inputs: list[Tensor], variant: str) -> Tensor:
    """The recurrence with one plausible mistake."""
    q, k = l2norm(inputs[0]) * WIDTH**-0.5, l2norm(inputs[1])
    v, beta = inputs[2], inputs[4].sigmoid()
    g = decay(inputs[3], inputs[5], inputs[6], -5.0)
    if variant == "clamped":
        g = decay(inputs[3], inputs[5], inputs[6], None).clamp(min=-5.0)
    if variant == "bias after slope":
        slope = inputs[5].exp()[:, None]
        g = -5.0 * torch.sigmoid(slope * inputs[3] + inputs[6])
    S, outs = inputs[7][0], []
    for t in range(len(q)):
        old, S = S, S * g[t].exp()[:, :, None]
        source = old if variant == "undecayed error" else S
        error = v[t] - torch.einsum("hkv,hk->hv", source, k[t])
        read = S
        S = S + torch.einsum("h,hk,hv->hkv", beta[t], k[t], error)
        if variant == "decay after write":
            S = (old + torch.einsum("h,hk,hv->hkv", beta[t], k[t], error)) * g[t].exp()[:, :, None]
        read = read if variant == "read before write" else S
        outs.append(torch.einsum("hkv,hk->hv", read, q[t]))
    return torch.stack(outs)


@pytest.mark.parametrize(
    "variant",
    ["clamped", "bias after slope", "undecayed error", "decay after write", "read before write"],
)
def test_plausible_mistakes_are_told_apart(variant: str) -> None:
    inputs = draw([40])
    ours, _ = run(kda, inputs, [40], -5.0)
    assert_close("right", _wrong(inputs, "none"), ours, 1e-10)
    with pytest.raises(AssertionError):
        assert_close("wrong", _wrong(inputs, variant), ours, 1e-2)


def test_convolution_window_and_state_hand_over_together() -> None:
    torch.manual_seed(0)
    u, w = torch.randn(9, 3 * WIDTH), torch.randn(3 * WIDTH, 4)
    z, b = torch.randn(9, 1, WIDTH), torch.randn(9, 1)
    A, bias = torch.zeros(1), torch.zeros(1, WIDTH)

    def layer(rows: slice, window: Tensor | None, state: Tensor | None) -> tuple:
        spans = Spans.from_lengths([rows.stop - rows.start])
        y, window = short_conv(u[rows], w, spans, window)
        q, k, v = (x.unflatten(-1, (1, WIDTH)) for x in y.chunk(3, dim=-1))
        o, state = kda(q, k, v, z[rows], b[rows], A, bias, spans, initial_state_NHKV=state)
        return o, window, state

    whole, _, _ = layer(slice(0, 9), None, None)
    for cut in range(1, 9):
        first, window, state = layer(slice(0, cut), None, None)
        second, _, _ = layer(slice(cut, 9), window, state)
        assert_close(f"cut at {cut}", torch.cat([first, second]), whole, 1e-6)
