"""KDA in full sweeps: every length, every split, all gates and both kinds of decay; long documents.

`pytest -m slow -s tests/ops/test_kda_slow.py` prints the worst errors of each sweep.
"""

from __future__ import annotations

import pytest
import torch
from checker import assert_close
from test_kda import BOUNDS, SHIFTS, draw, every_split, run

from k3.ops.kda import kda

pytestmark = pytest.mark.slow
CASES = [
    (gates, bound, dtype, rms)
    for dtype, rms in ((torch.float32, 1e-5), (torch.bfloat16, 5e-3))
    for bound in BOUNDS
    for gates in SHIFTS
]


@pytest.mark.parametrize("gates,bound,dtype,rms", CASES)
def test_every_split_of_every_length(
    gates: str, bound: float | None, dtype: torch.dtype, rms: float
) -> None:
    worst = every_split(130, gates, bound, dtype, rms)
    print(f"\n{gates}, {bound}, {dtype}:", {name: f"{error:.1e}" for name, error in worst.items()})


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_document_of_65537_tokens_equals_its_parts(bound: float | None) -> None:
    length, cut = 65537, 30001
    inputs = [x.detach() for x in draw([length], dtype=torch.float32)]
    whole, final = run(kda, inputs, [length], bound)
    o1, state = run(kda, [*(x[:cut] for x in inputs[:5]), *inputs[5:]], [cut], bound)
    o2, last = run(
        kda, [*(x[cut:] for x in inputs[:5]), *inputs[5:7], state], [length - cut], bound
    )
    assert_close("o", torch.cat([o1, o2]), whole, 1e-6)
    assert_close("state", last, final, 1e-6)
