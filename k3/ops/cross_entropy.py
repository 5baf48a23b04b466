"""The language-model head and its loss in one, so that the logits of all rows never exist at once.

Legend: R rows, D width, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3.ops.product import accumulate, product, wide, without_autocast

CHUNK_ELEMENTS = 1 << 19
"""Logits per chunk on a CPU: 2 MB stay in the cache between the product, the softmax and the two
gradient products."""


def linear_cross_entropy(
    h_RD: Tensor,
    weight_VD: Tensor,
    targets_R: Tensor,
    *,
    ignore_index: int = -100,
    chunk: int | None = None,
) -> Tensor:
    """Sum over rows of -log softmax(h @ weight.T)[target]: an fp32 scalar (fp64 for fp64).

    h_RD [R, D] (already normed), weight_VD [V, D], targets_R int64 [R]. Rows whose target is
    `ignore_index` cost nothing and get a zero gradient; without any valid row the loss is 0.
    `chunk` is the number of rows at a time. The gradients are made in the forward pass, where the
    logits are at hand, and kept in fp32. Raises ValueError for a target outside the vocabulary or
    shapes that do not fit.
    """
    rows, width = h_RD.shape
    if weight_VD.shape[1] != width or targets_R.shape != (rows,):
        raise ValueError(
            f"h {tuple(h_RD.shape)}, weight {tuple(weight_VD.shape)} and targets "
            f"{tuple(targets_R.shape)} do not fit"
        )
    return _LinearCrossEntropy.apply(h_RD, weight_VD, targets_R, ignore_index, chunk)


def _valid_rows(targets_R: Tensor, ignore_index: int, vocabulary: int) -> Tensor | None:
    """Indices of the rows that count, None when all do. The one host synchronisation of the
    loss."""
    kept = (targets_R != ignore_index).nonzero().squeeze(1)
    chosen = targets_R if kept.numel() == targets_R.numel() else targets_R[kept]
    if chosen.numel():
        low, high = torch.stack(torch.aminmax(chosen)).tolist()
        if low < 0 or high >= vocabulary:
            bad = low if low < 0 else high
            raise ValueError(f"target {bad} is outside the vocabulary of {vocabulary}")
    return None if chosen is targets_R else kept


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_RD: Tensor, weight_VD: Tensor, targets_R: Tensor, ignore: int, chunk: int | None
    ) -> Tensor:
        vocabulary = weight_VD.shape[0]
        kept = _valid_rows(targets_R, ignore, vocabulary)
        rows_h, rows_y = (h_RD, targets_R) if kept is None else (h_RD[kept], targets_R[kept])
        dtype = wide(h_RD.dtype)
        w = weight_VD.to(h_RD.dtype) if h_RD.is_cuda else weight_VD.to(dtype)
        wants_h, wants_w = ctx.needs_input_grad[:2]
        dh = torch.empty_like(rows_h, dtype=dtype) if wants_h else None
        dw = torch.zeros_like(weight_VD, dtype=dtype) if wants_w else None
        loss = torch.zeros((), dtype=dtype, device=h_RD.device)
        step = chunk or max(1, (CHUNK_ELEMENTS if not h_RD.is_cuda else 1 << 28) // vocabulary)
        with without_autocast(h_RD):
            for start in range(0, rows_h.shape[0], step):
                part = slice(start, start + step)
                loss += _chunk(rows_h[part], w, rows_y[part], None if dh is None else dh[part], dw)
        ctx.save_for_backward(dh, dw, kept)
        ctx.like = h_RD.shape, h_RD.dtype, weight_VD.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dh, dw, kept = ctx.saved_tensors
        shape, h_dtype, w_dtype = ctx.like
        if dw is not None:
            dw = (dw * grads[0]).to(w_dtype)
        if dh is not None:
            dh = (dh * grads[0]).to(h_dtype)
            if kept is not None:
                dh = dh.new_zeros(shape).index_copy_(0, kept, dh)
        return dh, dw, None, None, None


def _chunk(
    h_CD: Tensor, w_VD: Tensor, y_C: Tensor, dh_CD: Tensor | None, dw_VD: Tensor | None
) -> Tensor:
    """Loss of some rows; fills their `dh_CD` and adds to `dw_VD`."""
    z_CV = product(h_CD, w_VD.t())
    picked_C1 = z_CV.gather(1, y_C.unsqueeze(1))
    top_C1 = z_CV.amax(1, keepdim=True)
    e_CV = z_CV.sub_(top_C1).exp_()
    sum_C1 = e_CV.sum(1, keepdim=True)
    loss = (sum_C1.log() + top_C1 - picked_C1).sum()
    if dh_CD is None and dw_VD is None:
        return loss
    dz_CV = e_CV.div_(sum_C1)
    dz_CV.scatter_add_(1, y_C.unsqueeze(1), torch.full_like(picked_C1, -1.0))
    # on CUDA the gradient of the logits goes to the tensor cores in the operands' own type
    dz_CV = dz_CV.to(h_CD.dtype) if dz_CV.is_cuda else dz_CV
    if dh_CD is not None:
        dh_CD.copy_(product(dz_CV, w_VD))
    if dw_VD is not None:
        accumulate(dw_VD, dz_CV.t(), h_CD)
    return loss
