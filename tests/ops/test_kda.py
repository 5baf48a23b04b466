"""KDA: chunks against the fp64 recurrence at every length and every split, gates at both extremes,
packing, causality, decoding.

Legend: T tokens, X sequences of one length T, H heads, K key width, V value width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from checker import assert_close
from torch import Tensor

from k3.ops import kda_chunk
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
BOUNDS = (-5.0, None)
Op = Callable[..., tuple[Tensor, Tensor]]


def draw(
    lengths: list[int], gates: str = "usual", dtype: torch.dtype = torch.float64, heads: int = HEADS
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths) * 7 + len(lengths))
    T = sum(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shift, spread = SHIFTS[gates]
    tensors = [
        normal(T, heads, WIDTH),
        normal(T, heads, WIDTH),
        normal(T, heads, VALUES),
        normal(T, heads, WIDTH) * spread + shift,
        normal(T, heads),
        normal(heads) * 0.3,
        normal(heads, WIDTH) * 0.3,
        normal(len(lengths), heads, WIDTH, VALUES) * 0.3,
    ]
    return cast(tensors, dtype)


def cast(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """New leaves; A_log, dt_bias and the state are never narrower than fp32."""
    islands = torch.promote_types(dtype, torch.float32)
    return [
        x.detach().to(dtype if i < 5 else islands, copy=True).requires_grad_()
        for i, x in enumerate(tensors)
    ]


def run(op: Op, inputs: list[Tensor], lengths: list[int], bound: float | None) -> tuple:
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


def oracle(
    longest: int, gates: str, bound: float | None, dtype: torch.dtype
) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """One sequence of `longest` tokens, and the fp64 recurrence on each of its prefixes.

    Prefixes lie side by side as heads of one run, empty tokens (no key, no decay) before them, so
    that every length ends at the last step. Returns the inputs, the loss weights of `o` [T, H, V]
    and `state` [H, K, V] (a prefix takes the first ones), and the results: o, state and gradients,
    as [T, X, H, ·], [X, H, K, V] and so on, prefix x right-aligned.
    """
    inputs = [x.detach().double() for x in draw([longest], gates, dtype)]
    generator = torch.Generator().manual_seed(1)
    weights = {
        "o": torch.randn(longest, HEADS, VALUES, generator=generator).double(),
        "state": torch.randn(HEADS, WIDTH, VALUES, generator=generator).double(),
    }

    def aside(x: Tensor, empty: float) -> Tensor:
        return torch.stack(
            [
                torch.cat([torch.full_like(x[: longest - length], empty), x[:length]])
                for length in range(1, longest + 1)
            ],
            dim=1,
        )

    spread = [aside(x, e) for x, e in zip(inputs[:5], (0.0, 0.0, 0.0, -1e30, 0.0), strict=True)]
    spread += [x.expand(longest, *x.shape) for x in inputs[5:7]]
    spread += [inputs[7][0].expand(longest, *inputs[7].shape[1:])]
    leaves = [x.clone().requires_grad_() for x in spread]
    flat = [x.flatten(1, 2) for x in leaves[:5]] + [x.flatten(0, 1) for x in leaves[5:]]
    o, state = run(kda_ref, [*flat[:7], flat[7][None]], [longest], bound)
    o, state = o.unflatten(1, (longest, HEADS)), state[0].unflatten(0, (longest, HEADS))
    loss = (o * aside(weights["o"], 0.0)).sum() + (state * weights["state"]).sum()
    grads = torch.autograd.grad(loss, leaves)
    results = {"o": o.detach(), "state": state.detach()}
    results |= {f"d{name}": grad for name, grad in zip(NAMES, grads, strict=True)}
    return inputs, weights, results


def every_split(
    longest: int,
    gates: str = "usual",
    bound: float | None = -5.0,
    dtype: torch.dtype = torch.float32,
    rms: float = 1e-5,
    lengths: Sequence[int] = (),
    some: Sequence[int] = (),
) -> dict[str, float]:
    """All lengths up to `longest` and all their splits, the state carried over, against `oracle`;
    only `lengths` if given, and only splits at `some` places from either end and the middle.

    The splits of one length are one packed call for the first parts and one for the second, so a
    gradient flows from the second parts through the states into the first. Returns the worst
    relative RMS error of each tensor.
    """
    inputs, weights, expected = oracle(longest, gates, bound, dtype)
    worst: dict[str, float] = {}
    for T in lengths or range(1, longest + 1):
        places = {T // 2, *some, *(T - place for place in some)} if some else range(T + 1)
        before = sorted(place for place in places if 0 <= place <= T)
        after, X = [T - place for place in before], len(before)
        copies = [x[:T].expand(X, *x[:T].shape) for x in inputs[:5]]
        copies += [*inputs[5:7], inputs[7].expand(X, *inputs[7].shape[1:])]
        leaves = cast(copies, dtype)
        flat = [x.flatten(0, 1) for x in leaves[:5]]
        first = (torch.arange(T) < torch.tensor(before)[:, None]).flatten()
        parts = [x[first] for x in flat], [x[~first] for x in flat]
        o1, middle = run(kda, [*parts[0], *leaves[5:]], before, bound)
        o2, state = run(kda, [*parts[1], *leaves[5:7], middle], after, bound)
        order = torch.cat([first.nonzero(), (~first).nonzero()]).flatten().argsort()
        o = torch.cat([o1, o2])[order].unflatten(0, (X, T))
        loss = (o * weights["o"][:T]).sum() + (state * weights["state"]).sum()
        grads = torch.autograd.grad(loss, leaves)
        found = {"o": o, "state": state}
        found |= {f"d{name}": grad for name, grad in zip(NAMES, grads, strict=True)}
        for name, actual in found.items():
            wanted = expected[name]
            if name in ("dA_log", "ddt_bias"):  # summed over the splits
                pair = actual, wanted[T - 1] * X
            elif name in ("state", "dS"):
                pair = worst_of(actual, wanted[T - 1].expand_as(actual))
            else:
                pair = worst_of(actual, wanted[longest - T :, T - 1].expand_as(actual))
            limit = rms * LOOSER.get(name[1:], 1.0)
            assert_close(f"{name} T={T} {gates} {bound}", *pair, limit)
            worst[name] = max(worst.get(name, 0.0), relative(*pair))
    return worst


def relative(actual: Tensor, expected: Tensor) -> float:
    error = (actual.detach().double() - expected).square().mean().sqrt()
    return float(error / expected.square().mean().sqrt().clamp_min(1e-300))


def worst_of(actual: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of the first axis that differ most."""
    error_X = (actual.detach().double() - expected).square().flatten(1).sum(1)
    x = int(error_X.nan_to_num(nan=float("inf")).argmax())
    return actual[x], expected[x]


def test_every_length_forward_and_backward_at_many_splits() -> None:
    every_split(130, some=(0, 1, 3, 16, 32))


@pytest.mark.parametrize("gates", SHIFTS)
@pytest.mark.parametrize("bound", BOUNDS)
def test_every_split_around_the_edges_of_chunks(gates: str, bound: float | None) -> None:
    every_split(33, gates, bound, lengths=(1, 2, 3, 15, 16, 17, 31, 32, 33))


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("gates", SHIFTS)
def test_gates_at_both_extremes(gates: str, bound: float | None) -> None:
    for lengths in ([64], [65], [130], [20, 0, 1, 37, 64]):
        compare(lengths, gates, torch.float32, bound, 1e-5)


@pytest.mark.parametrize("gates", SHIFTS)
@pytest.mark.parametrize("bound", BOUNDS)
def test_fp64_equals_the_oracle(gates: str, bound: float | None) -> None:
    # The oracle's own sigmoid has lost eight digits of its slope at the floor, and softplus is
    # the identity above 20.
    limit = 1e-8 if gates == "floor" else 1e-10
    for lengths in ([33], [5, 0, 70]):
        compare(lengths, gates, torch.float64, bound, limit)


@pytest.mark.parametrize("gates", SHIFTS)
@pytest.mark.parametrize("bound", BOUNDS)
def test_bf16_inputs(gates: str, bound: float | None) -> None:
    # Outputs and gradients are rounded to bf16; what is checked is that the arithmetic in between
    # is not.
    compare([130], gates, torch.bfloat16, bound, 5e-3)


@pytest.mark.parametrize("limit", [1, 1 << 9, 1 << 11])
@pytest.mark.parametrize("bound", BOUNDS)
def test_blocks_of_any_size_give_the_same(
    limit: int, bound: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kda_chunk, "BLOCK_ELEMENTS", limit)
    compare([37, 0, 1, 70, 33, 64], "usual", torch.float32, bound, 1e-5)


@pytest.mark.parametrize("bound", BOUNDS)
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


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("with_", [1.0, float("nan")])
def test_changing_one_document_leaves_the_others_bit_identical(
    with_: float, bound: float | None
) -> None:
    lengths = [37, 51, 40]
    inputs = draw(lengths, dtype=torch.float32)
    before, states = run(kda, inputs, lengths, bound)
    changed = [x.detach().clone().requires_grad_() for x in inputs]
    with torch.no_grad():
        for x in changed[:5]:
            x[36] += with_
            x[0] += with_
    after, new_states = run(kda, changed, lengths, bound)
    assert torch.equal(before[37:], after[37:]) and torch.equal(states[1:], new_states[1:])
    assert not torch.equal(before[36], after[36])
    old, new = gradients((before, states), inputs[:5]), gradients((after, new_states), changed[:5])
    for name, a, b in zip(NAMES, old, new, strict=False):
        assert torch.equal(a[37:], b[37:]), f"d{name}"


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("at", [0, 5, 15, 16, 17, 20, 33, 44])
def test_a_later_gate_changes_nothing_earlier(at: int, bound: float | None) -> None:
    inputs = draw([45], "mixed", torch.float32)
    before, _ = run(kda, inputs, [45], bound)
    changed = [x.detach().clone() for x in inputs]
    changed[3][at:] = 20.0
    after, _ = run(kda, changed, [45], bound)
    # A chunk's decays are counted from its middle row, so a later gate may move earlier rows by
    # rounding alone.
    if at:
        assert_close("earlier rows", after[:at], before[:at], 1e-6)
    (dz,) = torch.autograd.grad(before[: at + 1].sum(), inputs[3])
    assert torch.equal(dz[at + 1 :], torch.zeros_like(dz[at + 1 :]))


def test_gradients_of_a_later_gate_reach_no_earlier_output() -> None:
    inputs = draw([45], "mixed", torch.float32)
    o, _ = run(kda, inputs, [45], -5.0)
    (dv,) = torch.autograd.grad(o[20].sum(), inputs[2])
    assert torch.equal(dv[21:], torch.zeros_like(dv[21:]))
    assert bool((dv[:21].abs().sum((1, 2)) > 0).all())


def test_slices_of_a_wider_tensor_autocast_and_repetition_change_no_bit() -> None:
    inputs = [x.detach() for x in draw([45], dtype=torch.float32)]
    expected, state = run(kda, inputs, [45], -5.0)
    wide = torch.cat([inputs[0], inputs[1], torch.ones(45, 2, 3), inputs[2]], dim=-1)
    split = wide.split([WIDTH, WIDTH, 3, VALUES], dim=-1)
    flat = torch.cat([x.flatten(1) for x in inputs[:2]], dim=-1).chunk(2, dim=-1)
    flat_q, flat_k = (x.unflatten(-1, (HEADS, WIDTH)) for x in flat)
    for q, k, v in ((split[0], split[1], split[3]), (flat_q, flat_k, inputs[2])):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            again, same = run(kda, [q, k, v, *inputs[3:]], [45], -5.0)
        assert torch.equal(again, expected) and torch.equal(same, state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_continues_a_prefill_token_by_token(dtype: torch.dtype) -> None:
    rms = 1e-5 if dtype == torch.float32 else 5e-3
    for prompt in (1, 2, 3, 40):
        inputs = [x.detach() for x in draw([prompt + 5], dtype=dtype)]
        spans = Spans.from_lengths([prompt + 5])
        exact = [x.double() for x in inputs]
        whole, final = kda_ref(*exact[:7], spans, initial_state_NHKV=exact[7])
        pool = torch.full((3, HEADS, WIDTH, VALUES), float("nan"))
        pool[2] = inputs[7][0]
        slot, outs = torch.tensor([2], dtype=torch.int32), []
        for start, stop in [(0, prompt), *((t, t + 1) for t in range(prompt, prompt + 5))]:
            step = [x[start:stop] for x in inputs[:5]]
            new = Spans.from_lengths([stop - start])
            outs.append(kda_decode(*step, *inputs[5:7], new, pool, slot))
        assert_close("decode", torch.cat(outs), whole, rms)
        assert_close("pool", pool[2], final[0])
        assert bool(pool[:2].isnan().all())


@pytest.mark.parametrize("lengths", [[2, 0, 1, 4], [1, 1, 1, 1], [3, 70, 0, 33]])
@pytest.mark.parametrize("slots", [[4, 0, -1, 1], [1, 2, 3, 4], [-1, -1, -1, -1], [3, -1, 4, 0]])
@pytest.mark.parametrize("bound", BOUNDS)
def test_decode_writes_its_slots_alone(
    lengths: list[int], slots: list[int], bound: float | None
) -> None:
    inputs = [x.detach() for x in draw(lengths, dtype=torch.float32)]
    spans = Spans.from_lengths(lengths)
    exact = [x.double() for x in inputs]
    whole, final = run(kda_ref, exact, lengths, bound)
    slot = torch.tensor(slots, dtype=torch.int32)
    live = slot >= 0
    pool = torch.full((6, HEADS, WIDTH, VALUES), float("nan"))
    pool[slot[live].long()] = inputs[7][live]
    before = pool.clone()
    o = kda_decode(*inputs[:7], spans, pool, slot, lower_bound=bound)
    live_T = live[spans.segments()]
    if live.any():
        assert_close("o", o[live_T], whole[live_T])
        assert_close("pool", pool[slot[live].long()], final[live])
    assert torch.equal(o[~live_T], torch.zeros_like(o[~live_T]))
    others = [p for p in range(6) if p not in slots]
    assert torch.equal(pool[others].isnan(), before[others].isnan())


def test_saturated_gates_are_exact_and_have_finite_gradients() -> None:
    for logit in (-200.0, 200.0, -1e5, 1e5):
        z = torch.full((1, 1, 4), logit, requires_grad=True)
        A = torch.full((1,), 100.0, requires_grad=True)
        bias = torch.zeros(1, 4, requires_grad=True)
        for bound in BOUNDS:
            factor = decay(z, A, bias, bound).exp()
            floor = 0.0 if bound is None else torch.tensor(-5.0).exp()
            assert torch.equal(factor, torch.ones_like(factor) * (1.0 if logit < 0 else floor))
            x = torch.ones(1, 1, 4)
            state = torch.ones(1, 1, 4, 4, requires_grad=True)
            o, final = kda(
                *(x, x, x, z, torch.zeros(1, 1), A, bias, Spans.from_lengths([1])),
                lower_bound=bound,
                initial_state_NHKV=state,
            )
            for grad in torch.autograd.grad(o.sum() + final.sum(), (z, A, bias, state)):
                assert bool(torch.isfinite(grad).all())


@pytest.mark.parametrize("raw", [5.0, -20.0])
@pytest.mark.parametrize("bound", BOUNDS)
def test_a_chunk_of_equal_raw_gates_in_bf16_is_finite(raw: float, bound: float | None) -> None:
    inputs = draw([64], dtype=torch.bfloat16)
    with torch.no_grad():
        inputs[3].fill_(raw)
    exact = [x.detach().double() for x in inputs]
    result, expected = run(kda, inputs, [64], bound), run(kda_ref, exact, [64], bound)
    assert_close("bf16", result[0], expected[0], 5e-3)
    for name, grad in zip(NAMES, gradients(result, inputs), strict=True):
        assert bool(torch.isfinite(grad).all()), name


def test_a_small_correction_to_a_large_value_is_kept() -> None:
    # The state predicts 4098 for a value of 4096; in bf16 the difference would be lost.
    inputs = [x.detach() for x in draw([40], "no decay", torch.float32)]
    inputs[2] = torch.full_like(inputs[2], 4096.0)
    inputs[7] = torch.full_like(inputs[7], 4098.0)
    inputs[4] = torch.full_like(inputs[4], 1e3)
    exact = [x.double() for x in inputs]
    result, expected = run(kda, inputs, [40], -5.0), run(kda_ref, exact, [40], -5.0)
    assert_close("o", result[0], expected[0], 1e-5)
    assert_close("state", result[1], expected[1], 1e-5)


def test_zero_tokens_zero_vectors_and_shut_gates() -> None:
    inputs = draw([0, 0], dtype=torch.float32)
    o, state = run(kda, inputs, [0, 0], -5.0)
    assert o.shape == (0, HEADS, VALUES) and torch.equal(state, inputs[7])
    inputs = draw([3], dtype=torch.float32)
    with torch.no_grad():
        inputs[0].zero_()
        inputs[1].zero_()
        inputs[4].copy_(torch.tensor([[-1e4], [0.0], [1e4]]).expand(3, HEADS))
    for grad in gradients(run(kda, inputs, [3], -5.0), inputs):
        assert bool(torch.isfinite(grad).all())


def test_bad_shapes_bounds_and_offsets_are_refused() -> None:
    inputs = draw([4])
    with pytest.raises(ValueError, match="shapes"):
        kda(*inputs[:7], Spans.from_lengths([3]))
    with pytest.raises(ValueError, match="lower_bound"):
        kda(*inputs[:7], Spans.from_lengths([4]), lower_bound=-6.0)
    with pytest.raises(ValueError, match="initial state"):
        kda(*inputs[:7], Spans.from_lengths([4]), initial_state_NHKV=inputs[7][:, :1])
    with pytest.raises(ValueError, match="slots"):
        kda_decode(*inputs[:7], Spans.from_lengths([4]), inputs[7], torch.tensor([0, 1]))
    for offsets in ([0, 12, 8, 16], [0, 8, 15], [1, 16], [0, 8, 17], []):
        with pytest.raises(ValueError, match="cu_seqlens"):
            Spans.from_cu_seqlens(torch.tensor(offsets, dtype=torch.int32), 16)
    assert Spans.from_cu_seqlens(torch.tensor([0, 8, 8, 16]), 16).lengths == (8, 0, 8)


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
    if variant == "slope per channel":
        slope = inputs[5].repeat(WIDTH // HEADS).exp()
        g = -5.0 * torch.sigmoid(slope * (inputs[3] + inputs[6]))
    if variant == "eps on the mean":
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + (WIDTH - 1) * 1e-6)
    if variant == "raw write strength":
        beta = inputs[4]
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
    [
        "clamped",
        "bias after slope",
        "slope per channel",
        "raw write strength",
        "undecayed error",
        "decay after write",
        "read before write",
    ],
)
def test_plausible_mistakes_are_told_apart(variant: str) -> None:
    inputs = draw([40])
    ours, _ = run(kda, inputs, [40], -5.0)
    assert_close("right", _wrong(inputs, "none"), ours, 1e-10)
    with pytest.raises(AssertionError):
        assert_close("wrong", _wrong(inputs, variant), ours, 1e-2)


def test_the_place_of_the_eps_shows_on_short_keys() -> None:
    inputs = draw([40])
    with torch.no_grad():
        inputs[1].mul_(1e-3)
    ours, _ = run(kda, inputs, [40], -5.0)
    assert_close("right", _wrong(inputs, "none"), ours, 1e-10)
    mean = [*inputs[:1], inputs[1] / WIDTH**0.5, *inputs[2:]]
    with pytest.raises(AssertionError):
        assert_close("eps on the mean", _wrong(mean, "none"), ours, 1e-2)


@pytest.mark.parametrize("prompt", [1, 2, 3, 6])
def test_convolution_window_and_state_hand_over_together(prompt: int) -> None:
    torch.manual_seed(0)
    T = prompt + 4
    u, w = torch.randn(T, 3 * WIDTH), torch.randn(3 * WIDTH, 4)
    z, b = torch.randn(T, 1, WIDTH), torch.randn(T, 1)
    A, bias, slot = torch.zeros(1), torch.zeros(1, WIDTH), torch.zeros(1, dtype=torch.int32)

    def heads(y: Tensor) -> list[Tensor]:
        return [x.unflatten(-1, (1, WIDTH)) for x in y.chunk(3, dim=-1)]

    spans = Spans.from_lengths([T])
    whole, final = kda(*heads(short_conv(u, w, spans)[0]), z, b, A, bias, spans)
    pool, window, outs = torch.zeros(1, 1, WIDTH, WIDTH), torch.zeros(1, 3, 3 * WIDTH), []
    for start, stop in [(0, prompt), *((t, t + 1) for t in range(prompt, T))]:
        rows, part = slice(start, stop), Spans.from_lengths([stop - start])
        y, window = short_conv(u[rows], w, part, window)
        outs.append(kda_decode(*heads(y), z[rows], b[rows], A, bias, part, pool, slot))
    assert_close("o", torch.cat(outs), whole, 1e-6)
    assert_close("state", pool, final, 1e-6)
