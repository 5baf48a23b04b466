"""Attention Residuals: each sublayer reads a softmax over depth of what earlier sublayers wrote.

`mix` is the direct form, used in training. `attend_blocks` + `merge` are the two-phase form for
inference: one pass over the finished blocks for all queries of a block, then an online-softmax
merge with the running sum. Which sources a sublayer sees is the model's business. Specification:
`attnres_ref.py`. Source: Kimi K3 report §2.2, §5.4.2.

Legend: T tokens, D width, S sources, Q queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3.ops.product import product, wide, without_autocast


def mix(sources: Sequence[Tensor], query_D: Tensor, gamma_D: Tensor, eps: float) -> Tensor:
    """sum_i p_i v_i with p = softmax_i of (gamma * query) . v_i / rms(v_i).

    sources: S >= 1 tensors [T, D] of one dtype; query_D, gamma_D [D] -> [T, D] in the sources'
    dtype. Scores, softmax and sum in fp32; gamma is folded into the query, never multiplied into a
    rounded key.
    """
    if not sources:
        raise ValueError("mix needs at least one source")
    shape, dtype = sources[0].shape, sources[0].dtype
    for source in sources:
        if source.shape != shape or source.dtype != dtype:
            raise ValueError(
                f"sources differ: {tuple(shape)} {dtype}, {tuple(source.shape)} {source.dtype}"
            )
    if not query_D.shape == gamma_D.shape == shape[-1:]:
        raise ValueError(
            f"query {tuple(query_D.shape)} and gamma {tuple(gamma_D.shape)} do not fit sources "
            f"{tuple(shape)}"
        )
    return _Mix.apply(query_D, gamma_D, eps, *sources)


def _fold(query: Tensor, gamma: Tensor, dtype: torch.dtype) -> Tensor:
    return query.to(dtype) * gamma.to(dtype)


def _rstd(v_TD: Tensor, eps: float) -> Tensor:
    """1 / rms of each row, [T]."""
    norm_T = torch.linalg.vector_norm(v_TD, dim=-1)
    return norm_T.square_().div_(v_TD.shape[-1]).add_(eps).rsqrt_()


class _Mix(torch.autograd.Function):
    """Hand-written because a graph of S norms, dots and products would store S rows of fp32 per
    token and op."""

    @staticmethod
    def forward(ctx: Any, query_D: Tensor, gamma_D: Tensor, eps: float, *sources: Tensor) -> Tensor:
        dtype = wide(sources[0].dtype)
        w_D = _fold(query_D, gamma_D, dtype)
        v_S = [source.to(dtype) for source in sources]
        rstd_ST = torch.stack([_rstd(v_TD, eps) for v_TD in v_S])
        with without_autocast(w_D):
            score_ST = torch.stack([torch.mv(v_TD, w_D) for v_TD in v_S]).mul_(rstd_ST)
        p_ST = torch.softmax(score_ST, 0)
        y_TD = v_S[0] * p_ST[0].unsqueeze(-1)
        for v_TD, p_T in zip(v_S[1:], p_ST[1:], strict=True):
            y_TD.addcmul_(v_TD, p_T.unsqueeze(-1))
        ctx.save_for_backward(query_D, gamma_D, rstd_ST, score_ST, p_ST, *sources)
        return y_TD.to(sources[0].dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query_D, gamma_D, rstd_ST, score_ST, p_ST, *sources = ctx.saved_tensors
        dtype = rstd_ST.dtype
        w_D = _fold(query_D, gamma_D, dtype)
        dy_TD = grads[0].to(dtype)
        v_S = [source.to(dtype) for source in sources]
        dp_ST = torch.stack([(v_TD * dy_TD).sum(-1) for v_TD in v_S])
        dp_ST -= (p_ST * dp_ST).sum(0)
        ds_ST = dp_ST.mul_(p_ST)
        # score = (w . v) r with r = rsqrt(v . v / D + eps):  d score / dv = r w - score r^2 / D v
        along_w_ST = ds_ST * rstd_ST
        along_v_ST = (along_w_ST * rstd_ST).mul_(score_ST).div_(-w_D.shape[0])
        dw_D = torch.zeros_like(w_D)
        dv_S: list[Tensor | None] = []
        for i, v_TD in enumerate(v_S):
            dw_D.addmv_(v_TD.t(), along_w_ST[i])
            if not ctx.needs_input_grad[3 + i]:
                dv_S.append(None)
                continue
            dv_TD = dy_TD * p_ST[i].unsqueeze(-1)
            dv_TD.addcmul_(v_TD, along_v_ST[i].unsqueeze(-1)).addr_(along_w_ST[i], w_D)
            dv_S.append(dv_TD.to(sources[i].dtype))
        dquery_D = (dw_D * gamma_D).to(query_D.dtype)
        dgamma_D = (dw_D * query_D).to(gamma_D.dtype)
        return dquery_D, dgamma_D, None, *dv_S


@dataclass(frozen=True)
class Partial:
    """Phase 1: per query the running maximum m, the sum l of exp(score - m), and the un-normalised
    output o; all fp32."""

    m_QT: Tensor
    l_QT: Tensor
    o_QTD: Tensor
    dtype: torch.dtype
    """The sources' dtype, which the merged result takes."""


def attend_blocks(
    blocks: Sequence[Tensor], queries_QD: Tensor, gammas_QD: Tensor, eps: float
) -> Partial:
    """All queries of one block against the finished block rows, read once.

    blocks: at least one [T, D]; queries_QD, gammas_QD [Q, D]. Source: Kimi K3 report §5.4.2 (phase
    1).
    """
    if not blocks:
        raise ValueError("attend_blocks needs at least one block row")
    dtype = wide(blocks[0].dtype)
    w_DQ = _fold(queries_QD, gammas_QD, dtype).t()
    v_TSD = torch.stack([block.to(dtype) for block in blocks], 1)
    with without_autocast(w_DQ):
        score_TSQ = torch.matmul(v_TSD, w_DQ) * _rstd(v_TSD, eps).unsqueeze(-1)
        m_TQ = score_TSQ.amax(1)
        e_TSQ = torch.exp(score_TSQ - m_TQ.unsqueeze(1))
        o_TQD = torch.bmm(e_TSQ.transpose(1, 2), v_TSD)
    return Partial(m_TQ.t(), e_TSQ.sum(1).t(), o_TQD.transpose(0, 1), blocks[0].dtype)


def merge(
    partial: Partial,
    index: int,
    prefix_TD: Tensor | None,
    query_D: Tensor,
    gamma_D: Tensor,
    eps: float,
) -> Tensor:
    """The mix of query `index` over the finished blocks and the running sum `prefix_TD`; None when
    there is no sum yet.

    [T, D] in the sources' dtype; equals `mix` of blocks + [prefix]. Source: Kimi K3 report §5.4.2
    (phase 2).
    """
    m_T, l_T, o_TD = partial.m_QT[index], partial.l_QT[index], partial.o_QTD[index]
    if prefix_TD is None:
        return (o_TD / l_T.unsqueeze(-1)).to(partial.dtype)
    v_TD = prefix_TD.to(o_TD.dtype)
    w_D1 = _fold(query_D, gamma_D, o_TD.dtype).unsqueeze(-1)
    with without_autocast(w_D1):
        score_T = product(v_TD, w_D1).squeeze(-1) * _rstd(v_TD, eps)
    top_T = torch.maximum(m_T, score_T)
    old_T, new_T = torch.exp(m_T - top_T), torch.exp(score_T - top_T)
    total_T = l_T * old_T + new_T
    y_TD = o_TD * (old_T / total_T).unsqueeze(-1) + v_TD * (new_T / total_T).unsqueeze(-1)
    return y_TD.to(partial.dtype)
