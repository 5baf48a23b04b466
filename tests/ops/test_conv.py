"""Short convolution: plain loop, packing, windows carried over any split, lengths shorter than
the window.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checker import assert_close
from torch import Tensor

from k3.ops.conv import short_conv
from k3.ops.spans import Spans


def plain(u: Tensor, w: Tensor, spans: Spans, window: Tensor | None) -> tuple[Tensor, Tensor]:
    taps = w.shape[1]
    outs, lasts = [], []
    for n, (start, stop) in enumerate(zip(spans.offsets, spans.offsets[1:], strict=False)):
        history = u.new_zeros(taps - 1, u.shape[1]) if window is None else window[n]
        seen = torch.cat([history, u[start:stop]])
        for t in range(stop - start):
            outs.append(F.silu((seen[t : t + taps] * w.T).sum(0)))
        lasts.append(seen[len(seen) - taps + 1 :])
    return torch.stack(outs) if outs else u, torch.stack(lasts)


def draw(lengths: list[int], channels: int, taps: int, dtype: torch.dtype = torch.float64) -> tuple:
    torch.manual_seed(sum(lengths) + taps)
    u = torch.randn(sum(lengths), channels, dtype=dtype, requires_grad=True)
    w = torch.randn(channels, taps, dtype=dtype, requires_grad=True)
    window = torch.randn(len(lengths), taps - 1, channels, dtype=dtype, requires_grad=True)
    return u, w, window, Spans.from_lengths(lengths)


@pytest.mark.parametrize("lengths", [[1], [2], [3], [4], [37, 51, 40], [0, 5, 0, 1, 2], [0]])
@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("carried", [True, False])
def test_values_and_gradients_equal_the_plain_loop(
    lengths: list[int], taps: int, carried: bool
) -> None:
    u, w, window, spans = draw(lengths, 6, taps)
    given = window if carried else None
    inputs = (u, w, window) if carried else (u, w)
    y, last = short_conv(u, w, spans, given)
    expected, expected_last = plain(u, w, spans, given)
    assert_close("y", y, expected, 1e-12)
    assert_close("window", last, expected_last, 1e-12)
    dy, dlast = torch.randn_like(y), torch.randn_like(last)
    ours = torch.autograd.grad((y * dy).sum() + (last * dlast).sum(), inputs, allow_unused=True)
    theirs = torch.autograd.grad(
        (expected * dy).sum() + (expected_last * dlast).sum(), inputs, allow_unused=True
    )
    for name, a, e in zip(("du", "dw", "dwindow"), ours, theirs, strict=False):
        assert_close(name, a, torch.zeros_like(a) if e is None else e, 1e-11)


def test_every_split_with_a_carried_window_equals_the_whole() -> None:
    u, w, _, _ = draw([13], 5, 4)
    whole, last = short_conv(u, w, Spans.from_lengths([13]))
    for cut in range(14):
        first, window = short_conv(u[:cut], w, Spans.from_lengths([cut]))
        second, end = short_conv(u[cut:], w, Spans.from_lengths([13 - cut]), window)
        assert_close("split", torch.cat([first, second]), whole, 1e-12)
        assert_close("window", end, last, 1e-12)


@pytest.mark.parametrize("change", [1.0, float("nan")])
@pytest.mark.parametrize("lengths", [[5, 7], [2, 2], [1, 1, 9]])
def test_a_document_never_sees_its_neighbour(lengths: list[int], change: float) -> None:
    u, w, window, spans = draw(lengths, 3, 4, torch.float32)
    edge = lengths[0]
    before, last = short_conv(u, w, spans, window)
    changed = u.detach().clone()
    changed[edge - 1] += change
    changed.requires_grad_()
    after, new_last = short_conv(changed, w, spans, window)
    assert torch.equal(before[edge:], after[edge:]) and torch.equal(last[1:], new_last[1:])
    assert not torch.equal(before[edge - 1], after[edge - 1])
    dy, dlast = torch.randn_like(before), torch.randn_like(last)
    old = torch.autograd.grad((before, last), (u, window), (dy, dlast))
    new = torch.autograd.grad((after, new_last), (changed, window), (dy, dlast))
    assert torch.equal(old[0][edge:], new[0][edge:]) and torch.equal(old[1][1:], new[1][1:])


def test_only_the_inputs_are_kept_for_the_backward_pass() -> None:
    u, w, window, spans = draw([40], 3, 4, torch.float32)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        short_conv(u, w, spans, window)
    assert {x.data_ptr() for x in kept} == {u.data_ptr(), w.data_ptr(), window.data_ptr()}


def test_bf16_is_computed_in_fp32_and_returned_as_bf16() -> None:
    u, w, _, spans = draw([40], 8, 4, torch.float32)
    y, window = short_conv(u.bfloat16(), w, spans)
    assert y.dtype == window.dtype == torch.bfloat16
    expected, _ = plain(u.bfloat16().float(), w, spans, None)
    assert_close("bf16", y, expected, 3e-3)


def test_shapes_are_checked() -> None:
    u, w, window, spans = draw([4], 3, 4)
    with pytest.raises(ValueError, match="conv input"):
        short_conv(u[:3], w, spans)
    with pytest.raises(ValueError, match="conv window"):
        short_conv(u, w, spans, window[:, :2])
