"""Drawing the next token: the same seed and position give the same token, whatever the batch holds.

Legend: N requests, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS = 31
"""Of the draw, and of the integers that probabilities are rounded to. Integer sums do not depend on
their order, so neither batch nor device moves the point where the cumulative sum crosses the draw;
the product of two such numbers fits int64. A token below 2**-32 is never drawn."""


def sample(
    logits_NV: Tensor,
    *,
    seed_N: Tensor,
    position_N: Tensor,
    temperature: float | Tensor = 1.0,
    top_p: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    min_p: float | Tensor = 0.0,
) -> tuple[Tensor, Tensor]:
    """(ids int64 [N], log-probabilities fp32 [N]).

    logits_NV [N, V]; -inf forbids a token. seed_N, position_N int64 [N] key the one uniform number
    of a request. Each option is a number or a tensor [N]. Temperature 0 is greedy, ties to the
    lower id. Filters act in the order temperature, top_k (0 is off), top_p (the fewest likely
    tokens that reach it, never none), min_p (relative to the likeliest). The log-probability is
    that of the raw logits at temperature 1, before any filter. Raises ValueError where a row has a
    NaN or no allowed token, and for options out of range.
    """
    logits_NV = logits_NV.float()
    rows = logits_NV.shape[0]
    if seed_N.shape != (rows,) or position_N.shape != (rows,):
        raise ValueError(
            f"seed {tuple(seed_N.shape)}, position {tuple(position_N.shape)} must be {(rows,)}"
        )
    temperature_N = _per_row(temperature, logits_NV, "temperature", 0.0, float("inf"))
    top_p_N = _per_row(top_p, logits_NV, "top_p", 0.0, 1.0)
    top_k_N = _per_row(top_k, logits_NV, "top_k", 0, float("inf"))
    min_p_N = _per_row(min_p, logits_NV, "min_p", 0.0, 1.0)
    top_N1 = logits_NV.amax(-1, keepdim=True)
    _refuse_bad_rows(top_N1)
    # exact even for a tiny temperature: the largest entry is 0 before the division
    hot_N1 = torch.where(temperature_N > 0, temperature_N, 1.0).unsqueeze(1)
    p_NV = torch.softmax((logits_NV - top_N1) / hot_N1, -1)
    p_NV = _filter(p_NV, top_k_N, top_p_N, min_p_N)
    drawn_N = _draw(p_NV, uniform_bits(seed_N, position_N))
    ids_N = torch.where(temperature_N > 0, drawn_N, logits_NV.argmax(-1))
    logp_NV = torch.log_softmax(logits_NV, -1)
    return ids_N, logp_NV.gather(1, ids_N.unsqueeze(1)).squeeze(1)


def uniform_bits(seed_N: Tensor, position_N: Tensor) -> Tensor:
    """31 random bits per (seed, position), int64 in 0..2**31 - 1.

    Two rounds of the splitmix64 finaliser, in wrapping integer arithmetic: the same on every
    device. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014).
    """
    state = _mix64(seed_N.to(torch.int64) + _GOLDEN)
    return _shift(_mix64(state + position_N.to(torch.int64) * _GOLDEN + _GOLDEN), 64 - BITS)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix64(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _per_row(
    value: float | Tensor, logits_NV: Tensor, name: str, low: float, high: float
) -> Tensor:
    row = torch.as_tensor(value, dtype=torch.float32, device=logits_NV.device)
    if row.dim() > 1 or not bool(((row >= low) & (row <= high)).all()):
        raise ValueError(
            f"{name} must be a number or one per request in {low}..{high}, got {value}"
        )
    return row.expand(logits_NV.shape[0])


def _refuse_bad_rows(top_N1: Tensor) -> None:
    bad_N = ~torch.isfinite(top_N1).squeeze(1)
    if bool(bad_N.any()):
        row = int(bad_N.nonzero()[0, 0])
        raise ValueError(f"logits of row {row} allow no token (largest is {float(top_N1[row, 0])})")


def _filter(p_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor) -> Tensor:
    """Probabilities with the refused tokens at zero; not renormalised after the last filter."""
    if bool(((top_k_N > 0) | (top_p_N < 1)).any()):
        # a stable sort, so that equal probabilities are refused from the higher id down
        sorted_NV, order_NV = p_NV.sort(stable=True, dim=-1, descending=True)
        rank_V = torch.arange(p_NV.shape[1], device=p_NV.device)
        kept_NV = (top_k_N == 0).unsqueeze(1) | (rank_V < top_k_N.unsqueeze(1))
        mass_NV = (sorted_NV * kept_NV).double()
        before_NV = mass_NV.cumsum(-1) - mass_NV
        reach_N1 = (top_p_N.double() * mass_NV.sum(-1)).unsqueeze(1)
        kept_NV &= (before_NV < reach_N1) | (rank_V == 0) | (top_p_N >= 1).unsqueeze(1)
        p_NV = p_NV * torch.zeros_like(kept_NV).scatter_(1, order_NV, kept_NV)
    if bool((min_p_N > 0).any()):
        p_NV = p_NV * (p_NV >= min_p_N.unsqueeze(1) * p_NV.amax(-1, keepdim=True))
    return p_NV


def _draw(p_NV: Tensor, bits_N: Tensor) -> Tensor:
    """The first id whose cumulative integer mass exceeds the draw, in order of ids."""
    share_NV = p_NV.double() / p_NV.sum(-1, keepdim=True, dtype=torch.float64)
    total_NV = (share_NV * (1 << BITS)).round_().to(torch.int64).cumsum(-1)
    point_N = (bits_N * total_NV[:, -1]) >> BITS
    return torch.searchsorted(total_NV, point_N.unsqueeze(1), right=True).squeeze(1)
