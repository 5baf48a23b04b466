"""One strict comparison for the whole test suite: by RMS and by maximum, and never satisfied by
a NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor


def assert_close(
    name: str, actual: Tensor, expected: Tensor, rms: float = 1e-5, maximum: float | None = None
) -> None:
    """Fails unless the shapes agree, both are finite, and the error is small in both measures.

    rms: largest RMS error over the RMS of `expected`.
    maximum: largest absolute error over the largest absolute value of `expected`; 20 x rms if None.
    Where `expected` is exactly zero everywhere, `actual` must be too.
    """
    assert actual.shape == expected.shape, f"{name}: {actual.shape} instead of {expected.shape}"
    a, e = actual.detach().double().cpu(), expected.detach().double().cpu()
    assert torch.isfinite(e).all(), f"{name}: the expected value is not finite"
    bad = int((~torch.isfinite(a)).sum())
    assert bad == 0, f"{name}: {bad} values are not finite"
    if a.numel() == 0:
        return
    error, scale = (a - e).square().mean().sqrt(), e.square().mean().sqrt()
    if scale == 0:
        assert error == 0, f"{name}: expected exact zeros, largest is {float(a.abs().max()):.3g}"
        return
    ratio, peak = float(error / scale), float((a - e).abs().max() / e.abs().max())
    assert ratio <= rms, f"{name}: relative RMS error {ratio:.3g} above {rms:.3g}"
    limit = 20 * rms if maximum is None else maximum
    assert peak <= limit, f"{name}: relative maximum error {peak:.3g} above {limit:.3g}"
