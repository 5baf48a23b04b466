"""Kimi Delta Attention: the one entrance for the model. Gate, normalisation and write strength
happen inside.

Training and prefill run in chunks (`kda_chunk`), a few tokens per sequence run as the recurrence on
the pool.

Legend: T tokens, H heads, K key width, V value width, N spans, P pool slots.
Source: Kimi K3 report §2.1.1; equations in `kda_ref`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3.ops.kda_chunk import chunk_kda
from k3.ops.kda_ref import decay, l2norm
from k3.ops.product import wide, without_autocast
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
    Arithmetic is fp32, fp64 for fp64 inputs. A span's result does not depend on what else is
    packed; within a chunk of 32 a later gate may move an earlier row by rounding.
    ValueError when shapes disagree or the bound is out of range.
    """
    _check(q_THK, k_THK, v_THV, z_THK, b_TH, A_log_H, dt_bias_HK, spans, lower_bound)
    N, (H, K), V = spans.num_spans, q_THK.shape[1:], v_THV.shape[2]
    if initial_state_NHKV is not None and initial_state_NHKV.shape != (N, H, K, V):
        raise ValueError(
            f"kda: initial state {tuple(initial_state_NHKV.shape)}, expected {(N, H, K, V)}"
        )
    inputs = (q_THK, k_THK, v_THV, z_THK, b_TH, A_log_H, dt_bias_HK)
    scale = K**-0.5 if scale is None else scale
    return chunk_kda(*inputs, spans, initial_state_NHKV, lower_bound, scale)


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

    Arguments as `kda`. A span whose slot is negative is skipped: its output is zero and no state
    is touched. ValueError also when slots and spans disagree in number.
    """
    _check(q_THK, k_THK, v_THV, z_THK, b_TH, A_log_H, dt_bias_HK, spans, lower_bound)
    if slot_N.shape != (spans.num_spans,):
        raise ValueError(f"kda_decode: {tuple(slot_N.shape)} slots, {spans.num_spans} spans")
    scale = q_THK.shape[-1] ** -0.5 if scale is None else scale
    inputs = (q_THK, k_THK, v_THV, z_THK, b_TH, A_log_H, dt_bias_HK)
    states = _neighbours(S_PHKV, slot_N)
    if states is not None and spans.max_len <= RECURRENT_TOKENS:
        with without_autocast(q_THK):
            return _recur(*inputs, spans, states, lower_bound, scale)
    slot_N = slot_N.long()
    live_N = slot_N >= 0
    states = S_PHKV.index_select(0, slot_N.clamp_min(0))
    if spans.max_len <= RECURRENT_TOKENS:
        with without_autocast(q_THK):
            o_THV = _recur(*inputs, spans, states, lower_bound, scale)
    else:
        o_THV, states = chunk_kda(*inputs, spans, states, lower_bound, scale)
    if bool(live_N.all()):
        S_PHKV.index_copy_(0, slot_N, states.to(S_PHKV.dtype))
        return o_THV
    S_PHKV[slot_N[live_N]] = states[live_N].to(S_PHKV.dtype)
    return torch.where(live_N[spans.segments()][:, None, None], o_THV, 0.0)


def _neighbours(S_PHKV: Tensor, slot_N: Tensor) -> Tensor | None:
    """The slots as a view of the pool, if they are consecutive and reading them is free."""
    if slot_N.device.type != "cpu" or len(slot_N) == 0:
        return None
    slots: list[int] = slot_N.tolist()
    if slots[0] < 0 or slots != list(range(slots[0], slots[0] + len(slots))):
        return None
    return S_PHKV[slots[0] : slots[0] + len(slots)]


def _recur(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    z_THK: Tensor,
    b_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    spans: Spans,
    S_NHKV: Tensor,
    lower_bound: float | None,
    scale: float,
) -> Tensor:
    """Token i of every span that has one, together; the states are updated in place."""
    dtype = wide(torch.promote_types(q_THK.dtype, A_log_H.dtype))
    alpha = decay(z_THK, A_log_H, dt_bias_HK, lower_bound).to(dtype).exp_()
    q, k, v = l2norm(q_THK.to(dtype)).mul_(scale), l2norm(k_THK.to(dtype)), v_THV.to(dtype)
    beta = b_TH.to(dtype).sigmoid()
    if min(spans.lengths, default=0) == spans.max_len == 1:
        return _one_token(q, k, v, alpha, beta, S_NHKV).to(v_THV.dtype)
    o_THV = torch.empty_like(v)
    for i in range(spans.max_len):
        rows = [n for n, length in enumerate(spans.lengths) if length > i]
        n = torch.tensor(rows, device=q.device)
        t = torch.tensor([spans.offsets[row] + i for row in rows], device=q.device)
        states = S_NHKV.index_select(0, n)
        o_THV[t] = _one_token(q[t], k[t], v[t], alpha[t], beta[t], states)
        S_NHKV.index_copy_(0, n, states)
    return o_THV.to(v_THV.dtype)


def _one_token(
    q_NHK: Tensor, k_NHK: Tensor, v_NHV: Tensor, alpha_NHK: Tensor, beta_NH: Tensor, S_NHKV: Tensor
) -> Tensor:
    """o [N, H, V]; the states are updated in place. Reads of the decayed state are reads of the
    state by decayed vectors, so that one product serves q and k.
    """
    qk = torch.stack([q_NHK, k_NHK], dim=2) * alpha_NHK[:, :, None]
    read_q, read_k = torch.matmul(qk, S_NHKV.to(qk.dtype)).unbind(2)
    change = (v_NHV - read_k).mul_(beta_NH[..., None])
    S_NHKV.mul_(alpha_NHK[..., None]).addcmul_(k_NHK[..., None], change[:, :, None])
    return torch.addcmul(read_q, (q_NHK * k_NHK).sum(-1, keepdim=True), change)


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
