"""Kimi Delta Attention as its equations say, one token at a time: the specification of the fast
paths.

    g = lower_bound · sigmoid(exp(A) · (z + dt_bias))     log-decay per key channel (bounded, K3)
    g = -exp(A) · softplus(z + dt_bias)                   (unbounded, Kimi Linear)
    S <- diag(exp g) S
    S <- S + β k (v - Sᵀ k)ᵀ
    o  = Sᵀ q

with q and k normalised to unit length per head, q scaled by K^-1/2 and β = sigmoid(b).

Legend: T tokens, H heads, K key width, V value width, N spans.
Source: Kimi K3 report §2.1.1, eq. 1-6; released weights for the query scale and the place of the
bias.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from k3.ops.product import wide
from k3.ops.spans import Spans

L2_EPS = 1e-6
MAX_A_LOG = 80.0
"""exp(80) is the largest slope that keeps exp(A)·z finite in fp32; the sigmoid is a step long
before.
"""


def decay(z_THK: Tensor, A_log_H: Tensor, dt_bias_HK: Tensor, lower_bound: float | None) -> Tensor:
    """Log-decay g [T, H, K] <= 0 from its logits; at least fp32."""
    dtype = wide(torch.promote_types(z_THK.dtype, A_log_H.dtype))
    slope_H1 = A_log_H.to(dtype).clamp(max=MAX_A_LOG).exp()[:, None]
    shifted_THK = z_THK.to(dtype) + dt_bias_HK.to(dtype)
    if lower_bound is None:
        return -slope_H1 * F.softplus(shifted_THK)
    return lower_bound * torch.sigmoid(slope_H1 * shifted_THK)


def l2norm(x: Tensor) -> Tensor:
    """x / sqrt(Σ x² + 1e-6) over the last axis; at least fp32. The eps stands on the sum, not on
    the mean.
    """
    x = x.to(wide(x.dtype))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def kda_ref(
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
    """The recurrence. Arguments and results as `k3.ops.kda.kda`; fp64 inputs give the fp64
    oracle.
    """
    heads, width = q_THK.shape[1:]
    q = l2norm(q_THK) * (width**-0.5 if scale is None else scale)
    k, v = l2norm(k_THK), v_THV.to(q.dtype)
    g, beta = decay(z_THK, A_log_H, dt_bias_HK, lower_bound), b_TH.to(q.dtype).sigmoid()
    outputs, states = [], []
    for n, (start, stop) in enumerate(zip(spans.offsets, spans.offsets[1:], strict=False)):
        S = q.new_zeros(heads, width, v.shape[-1])
        if initial_state_NHKV is not None:
            S = initial_state_NHKV[n].to(q.dtype)
        for t in range(start, stop):
            S = S * g[t].exp()[:, :, None]
            error_HV = v[t] - torch.einsum("hkv,hk->hv", S, k[t])
            S = S + torch.einsum("h,hk,hv->hkv", beta[t], k[t], error_HV)
            outputs.append(torch.einsum("hkv,hk->hv", S, q[t]))
        states.append(S)
    o_THV = torch.stack(outputs) if outputs else v
    final = torch.stack(states) if states else q.new_zeros(0, heads, width, v.shape[-1])
    return o_THV.to(v_THV.dtype), final
