"""Kimi Delta Attention: the one entrance for the model. Gate, normalisation and write strength
happen inside.

Training and prefill run in chunks (`kda_chunk`), a few tokens per sequence run as the recurrence on
the pool.

Legend: T tokens, H heads, K key width, V value width, N spans, P pool slots.
Source: Kimi K3 report §2.1.1; equations in `kda_ref`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3.ops.kda_chunk import chunk_kda
from k3.ops.kda_ref import L2_EPS, MAX_A_LOG, decay
from k3.ops.product import wide
from k3.ops.spans import Spans

RECURRENT_TOKENS = 4
"""Up to this many new tokens per sequence the recurrence is cheaper than a padded chunk."""


def kda(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    z_THK: Tensor,
    b_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    spans: Spans,
    *,
    lower_bound: float | None = -5.0,
    initial_state_NHKV: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(o [T, H, V] in v's dtype, final state [N, H, K, V] fp32), differentiable in every tensor.

    q, k: before normalisation; z: decay logits without bias; b: write-strength logits;
    lower_bound in [-5, 0), or None for the softplus decay; scale of q, K^-1/2 when None.
    Arithmetic is fp32, fp64 for fp64
    inputs.
    ValueError when shapes disagree or the bound is out of range.
    """
    _check(q_THK, k_THK, v_THV, z_THK, b_TH, A_log_H, dt_bias_HK, spans, lower_bound)
    q, k, v, g, beta = _prepare(
        q_THK, k_THK, v_THV, z_THK, b_TH, A_log_H, dt_bias_HK, lower_bound, scale
    )
    initial = None if initial_state_NHKV is None else initial_state_NHKV.to(q.dtype)
    o_THV, final = chunk_kda(q, k, v, g, beta, spans, initial, lower_bound is not None)
    return o_THV.to(v_THV.dtype), final


@torch.no_grad()
def kda_decode(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    z_THK: Tensor,
    b_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    spans: Spans,
    S_PHKV: Tensor,
    slot_N: Tensor,
    *,
    lower_bound: float | None = -5.0,
    scale: float | None = None,
) -> Tensor:
    """o [T, H, V] of new tokens that continue the states S[slot], which are updated in place.

    A span whose slot is negative is skipped: its output is zero and no state is touched.
    """
    _check(q_THK, k_THK, v_THV, z_THK, b_TH, A_log_H, dt_bias_HK, spans, lower_bound)
    q, k, v, g, beta = _prepare(
        q_THK, k_THK, v_THV, z_THK, b_TH, A_log_H, dt_bias_HK, lower_bound, scale
    )
    slot_N = slot_N.long()
    live_N = slot_N >= 0
    states = S_PHKV[slot_N.clamp_min(0)].to(q.dtype)
    if spans.max_len <= RECURRENT_TOKENS:
        o_THV, states = _recur(q, k, v, g, beta, spans, states)
    else:
        o_THV, states = chunk_kda(q, k, v, g, beta, spans, states, lower_bound is not None)
    if bool(live_N.all()):
        S_PHKV[slot_N] = states.to(S_PHKV.dtype)
        return o_THV.to(v_THV.dtype)
    S_PHKV[slot_N[live_N]] = states[live_N].to(S_PHKV.dtype)
    live_T = live_N[spans.segments()][:, None, None]
    return torch.where(live_T, o_THV, 0.0).to(v_THV.dtype)


def _recur(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, spans: Spans, S_NHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """Token i of every span that has one, together."""
    o_THV = torch.empty_like(v)
    starts = spans.offsets[:-1]
    for i in range(spans.max_len):
        rows = [n for n, length in enumerate(spans.lengths) if length > i]
        n = torch.tensor(rows, device=q.device)
        t = torch.tensor([starts[row] + i for row in rows], device=q.device)
        S = S_NHKV[n] * g[t].exp()[..., None]
        error = v[t] - torch.matmul(k[t].unsqueeze(-2), S).squeeze(-2)
        S += (beta[t][..., None] * k[t])[..., None] * error.unsqueeze(-2)
        o_THV[t] = torch.matmul(q[t].unsqueeze(-2), S).squeeze(-2)
        S_NHKV[n] = S
    return o_THV, S_NHKV


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Unit q (scaled) and k, v, log-decay and write strength, in one wide dtype."""
    dtype = wide(torch.promote_types(q.dtype, A_log.dtype))
    unit_q = _L2Norm.apply(q.to(dtype), q.shape[-1] ** -0.5 if scale is None else scale)
    unit_k = _L2Norm.apply(k.to(dtype), 1.0)
    if lower_bound is None:
        g = decay(z, A_log, dt_bias, None).to(dtype)
    else:
        slope_H1 = A_log.to(dtype).clamp(max=MAX_A_LOG).exp()[:, None]
        g = _BoundedDecay.apply(slope_H1 * (z.to(dtype) + dt_bias.to(dtype)), lower_bound)
    return unit_q, unit_k, v.to(dtype), g, b.to(dtype).sigmoid()


class _L2Norm(torch.autograd.Function):
    """scale · x / sqrt(Σ x² + eps), finite gradient at zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        inverse = torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)
        unit = x * inverse
        ctx.save_for_backward(unit, inverse)
        ctx.scale = scale
        return unit * scale if scale != 1.0 else unit

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        unit, inverse = ctx.saved_tensors
        along = (dy * unit).sum(-1, keepdim=True)
        return (dy - unit * along) * (inverse * ctx.scale), None


class _BoundedDecay(torch.autograd.Function):
    """bound · sigmoid(x); the slope is σ(x)·σ(-x), since 1 - σ(x) has no digits left in fp32 at
    a saturated gate.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bound = bound
        return x.sigmoid().mul_(bound)

    @staticmethod
    def backward(ctx: Any, dg: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return (dg * x.sigmoid()).mul_(x.neg().sigmoid_()).mul_(ctx.bound), None


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    spans: Spans,
    lower_bound: float | None,
) -> None:
    T, H, K = q.shape
    found = (
        k.shape,
        z.shape,
        v.shape[:2],
        b.shape,
        A_log.shape,
        dt_bias.shape,
        (spans.num_tokens,),
    )
    expected = ((T, H, K), (T, H, K), (T, H), (T, H), (H,), (H, K), (T,))
    if any(tuple(a) != b for a, b in zip(found, expected, strict=True)):
        shapes = [tuple(a) for a in found]
        raise ValueError(
            f"kda: shapes of k, z, v, b, A_log, dt_bias, spans {shapes}, q is {(T, H, K)}"
        )
    if lower_bound is not None and not -5.0 <= lower_bound < 0.0:
        raise ValueError(f"kda: lower_bound must lie in [-5, 0) or be None, got {lower_bound}")
