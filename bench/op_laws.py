"""The exact claims about single operations, each in a second: writes docs/records/op-laws.

python bench/op_laws.py
"""

from __future__ import annotations

from typing import Any

import record
import torch

from k3.ops.attnres import attend_blocks, merge, mix
from k3.ops.orthogonal import orthogonalize
from k3.ops.situ import situ_glu, swiglu

SEEDS = (0, 1, 2)


def head_spread(per_head: bool) -> float:
    """Largest over smallest update RMS of eight 64 x 512 heads, gradients falling by sqrt(10)."""
    m = torch.randn(8, 64, 512) * (10.0 ** -(torch.arange(8) / 2)).view(8, 1, 1)
    update = orthogonalize(m) if per_head else orthogonalize(m.reshape(512, 512)).view_as(m)
    rms = update.square().mean((1, 2)).sqrt()
    return float(rms.max() / rms.min())


def two_phase_error() -> float:
    """Relative maximum difference of the two phases from the direct mix: 8 rows, 24 queries."""
    rows, gamma = [torch.randn(256, 512) for _ in range(9)], 1 + 0.2 * torch.randn(24, 512)
    query = torch.randn(24, 512) * 512**-0.5
    partial = attend_blocks(rows[:-1], query, gamma, 1e-5)
    worst = 0.0
    for i in range(24):
        direct = mix(rows, query[i], gamma[i], 1e-5)
        merged = merge(partial, i, rows[-1], query[i], gamma[i], 1e-5)
        worst = max(worst, float((merged - direct).abs().max() / direct.abs().max()))
    return worst


def situ_bound() -> float:
    g, u = torch.randn(2, 1 << 20) * 10 ** torch.empty(2, 1 << 20).uniform_(-3, 6)
    return float(situ_glu(g, u).abs().max())


def situ_slope() -> float:
    """Relative RMS distance from SwiGLU at inputs of size 0.01."""
    g, u = torch.randn(2, 1 << 20) * 1e-2
    expected = swiglu(g, u)
    return float(
        (situ_glu(g, u) - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    )


def over_seeds(measure: Any, *arguments: Any) -> list[float]:
    values = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        values.append(measure(*arguments))
    return values


def main() -> None:
    row = record.result
    muon, situ = "muon-heads-balanced", "situ-bound"
    results = [
        row(
            "per head: largest / smallest update",
            over_seeds(head_spread, True),
            "",
            "<= 1.02",
            muon,
        ),
        row("whole matrix: the same", over_seeds(head_spread, False), "", ">= 50", muon),
        row(
            "two phases beside direct, relative maximum",
            over_seeds(two_phase_error),
            "",
            "<= 1e-5",
            "attnres-two-phase",
        ),
        row("largest |SiTU-GLU|, inputs up to 1e6", over_seeds(situ_bound), "", "<= 100", situ),
        row("distance from SwiGLU at 0.01, relative", over_seeds(situ_slope), "", "<= 1e-4", situ),
    ]
    lines = [f"{r['name']}: {r['value']} (target {r['target']})" for r in results]
    print("\n".join(lines))
    folder = record.write("op-laws", "python bench/op_laws.py", SEEDS, results, lines)
    print(f"written: {folder.relative_to(record.ROOT)}")


if __name__ == "__main__":
    main()
