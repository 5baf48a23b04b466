"""KDA and Attention Residuals against fla's naive files, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from checker import assert_close
from torch import Tensor
from vendor import fla_naive

from k3.ops.attnres import attend_blocks, merge, mix
from k3.ops.kda import kda, kda_decode
from k3.ops.spans import Spans

pytestmark = pytest.mark.peers

LIMIT = 1e-5
"""Relative RMS error of outputs and of each gradient; both sides are fp32."""
NAMES = ("q", "k", "v", "z", "b", "A_log", "dt_bias", "state")


def inputs(lengths: list[int], heads: int, key: int, value: int, spread: float) -> list[Tensor]:
    """q, k, v, z, b, A_log, dt_bias and a state per span; `spread` sets how far the gates go."""
    generator = torch.Generator().manual_seed(sum(lengths) + key)
    tokens = sum(lengths)
    shapes = [(tokens, heads, width) for width in (key, key, value, key)]
    shapes += [(tokens, heads), (heads,), (heads, key), (len(lengths), heads, key, value)]
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    made[3] *= spread
    return [tensor.requires_grad_() for tensor in made]


def theirs(args: list[Tensor], spans: Spans, lower_bound: float | None) -> tuple[Tensor, Tensor]:
    """fla's recurrence, one span after the other, with the gates that its kernels apply inside."""
    q, k, v, z, b, A_log_H, dt_bias_HK, state_NHKV = args
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    slope, shifted = A_log_H.exp()[:, None], z + dt_bias_HK
    if lower_bound is None:
        g = -slope * F.softplus(shifted)
    else:
        g = lower_bound * (slope * shifted).sigmoid()
    outputs, states = [], []
    for n, (start, stop) in enumerate(zip(spans.offsets, spans.offsets[1:], strict=False)):
        flat = (q, k, v, g, b.sigmoid())
        o, S = fla_naive("kda").naive_recurrent_kda(
            *(x[None, start:stop] for x in flat),
            initial_state=state_NHKV[n, None],
            output_final_state=True,
        )
        outputs.append(o[0])
        states.append(S[0])
    return torch.cat(outputs), torch.stack(states)


def with_gradients(
    run: Callable[[], tuple[Tensor, Tensor]], args: list[Tensor]
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Outputs, and gradients of one fixed weighting of them."""
    outputs = list(run())
    generator = torch.Generator().manual_seed(7)
    weighted = (out * torch.randn(out.shape, generator=generator) for out in outputs)
    return outputs, torch.autograd.grad(sum(w.sum() for w in weighted), args)


@pytest.mark.parametrize("lower_bound", (-5.0, None))
@pytest.mark.parametrize(
    ("lengths", "heads", "key", "value", "spread"),
    [
        ([1], 2, 16, 16, 1.0),
        ([16], 1, 24, 24, 1.0),
        ([17], 3, 32, 16, 1.0),
        ([65], 2, 16, 24, 8.0),
        ([100], 1, 32, 32, 1.0),
        ([5, 16, 40, 1, 33], 2, 24, 24, 3.0),
    ],
    ids=str,
)
def test_kda(
    lengths: list[int],
    heads: int,
    key: int,
    value: int,
    spread: float,
    lower_bound: float | None,
) -> None:
    spans, args = Spans.from_lengths(lengths), inputs(lengths, heads, key, value, spread)

    def ours() -> tuple[Tensor, Tensor]:
        return kda(*args[:-1], spans, lower_bound=lower_bound, initial_state_NHKV=args[-1])

    outputs, gradients = with_gradients(ours, args)
    expected, slopes = with_gradients(lambda: theirs(args, spans, lower_bound), args)
    for name, a, e in zip(("o", "state"), outputs, expected, strict=True):
        assert_close(name, a, e, rms=LIMIT)
    for name, a, e in zip(NAMES, gradients, slopes, strict=True):
        assert_close(f"gradient of {name}", a, e, rms=LIMIT)


def test_kda_decode() -> None:
    lengths = [1, 3, 20]
    spans, args = Spans.from_lengths(lengths), [x.detach() for x in inputs(lengths, 2, 16, 24, 1.0)]
    pool, slots = torch.randn(5, 2, 16, 24), torch.tensor([4, 0, 2], dtype=torch.int32)
    expected, states = theirs([*args[:-1], pool[slots.long()]], spans, -5.0)
    assert_close("o", kda_decode(*args[:-1], spans, pool, slots), expected, rms=LIMIT)
    assert_close("state", pool[slots.long()], states, rms=LIMIT)


def test_flas_chunked_form() -> None:
    """Their second form agrees too: ours is not only equal to one loop."""
    args = [x.detach() for x in inputs([128], 2, 16, 16, 1.0)]
    spans = Spans.from_lengths([128])
    q, k, v, z, b, A_log_H, dt_bias_HK, state = args
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    g = -5.0 * (A_log_H.exp()[:, None] * (z + dt_bias_HK)).sigmoid()
    flat = (x.unsqueeze(0) for x in (q, k, v, g, b.sigmoid()))
    o, S = fla_naive("kda").naive_chunk_kda(
        *flat, initial_state=state, output_final_state=True, chunk_size=16
    )
    o_THV, final = kda(*args[:-1], spans, initial_state_NHKV=state)
    assert_close("o", o_THV, o[0], rms=LIMIT)
    assert_close("state", final, S, rms=LIMIT)


@pytest.mark.parametrize("count", (1, 2, 9))
def test_attention_residuals(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    sources = [(1 + n) * torch.randn(6, 40, generator=generator) for n in range(count)]
    query, gamma = (torch.randn(40, generator=generator) for _ in range(2))
    args = [x.requires_grad_() for x in (*sources, query, gamma)]
    eps = 1e-5

    def naive(values: list[Tensor]) -> Tensor:
        *v, q, weight = values
        return fla_naive("attnres").naive_attnres(q, v, weight, rms_eps=eps)

    weighting = torch.randn(6, 40, generator=generator)
    actual, expected = mix(sources, query, gamma, eps), naive(args)
    assert_close("mix", actual, expected, rms=1e-6)
    slopes = [torch.autograd.grad((out * weighting).sum(), args) for out in (actual, expected)]
    for index, (a, e) in enumerate(zip(*slopes, strict=True)):
        if count == 1 and index:
            assert float(a.abs().max()) < 1e-5, "one source leaves nothing to choose"
        else:
            assert_close(f"gradient {index}", a, e, rms=LIMIT)
    if count > 1:
        partial = attend_blocks(sources[:-1], query[None], gamma[None], eps)
        twice = merge(partial, 0, sources[-1], query, gamma, eps)
        assert_close("two phases", twice, expected, rms=1e-6)
