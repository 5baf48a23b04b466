"""Kimi Delta Attention in chunks: dense products inside a chunk, one state hand-over between
chunks.

With Γ_i the product of the decays of a chunk's rows 0..i (kept as cumulative log-decay G):

    L_ij = β_i Σ_c k_ic k_jc Γ_ic/Γ_jc  for i > j        A_ij = Σ_c q_ic k_jc Γ_ic/Γ_jc  for i >= j
    [W | U] = (I + L)⁻¹ diag(β) [Γ⊙K | V]
    Ṽ = U - W S_in          O = (Γ⊙Q) S_in + A Ṽ          S_out = diag(Γ_C) S_in + (Γ_C/Γ ⊙ K)ᵀ Ṽ

The bounded decay makes L and A plain products: a log-decay of at least -5 a token keeps the
exponents of 32 rows
within ±80 of the middle row, inside fp32's ±88, so (q·exp(G-M)) (k·exp(M-G))ᵀ needs no tiles.
Entries above the
diagonal may overflow there; they are selected away, never multiplied. Without a bound the
differences G_i - G_j are
exponentiated pair by pair, in chunks of 16.

Everything but the hand-over runs for all chunks of all spans and heads at once. Chunks are ordered
by their place in
their span, longest span first, so one step of the hand-over is one slice.

Legend: T tokens, M chunks, C rows per chunk, H heads, K key width, V value width, N spans, B = M·H.
Source: Kimi K3 report eq. 3-4; the derivation of the backward pass is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k3.ops.product import without_autocast
from k3.ops.spans import Spans

BOUNDED_CHUNK = 32
UNBOUNDED_CHUNK = 16


@dataclass(frozen=True, eq=False)
class Chunks:
    """Where each chunk row comes from."""

    rows_MC: Tensor
    """Token of each chunk row, int64; 0 for the empty rows before a short chunk."""
    pad_R: Tensor | None
    """Flat positions of the empty rows; None when there are none."""
    back_T: Tensor
    """Flat chunk row of each token."""
    steps: tuple[tuple[int, int], ...]
    """Slices of M, one per step of the hand-over; each covers the first spans of `order`."""
    order_N: Tensor
    """Spans by falling length."""
    size: int


def plan(spans: Spans, size: int) -> Chunks:
    """Cuts every span into chunks of `size` rows."""
    return _plan(spans.lengths, size, spans.device)


@lru_cache(maxsize=16)
def _plan(lengths: tuple[int, ...], size: int, device: torch.device) -> Chunks:
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    starts: list[int] = []
    counts: list[int] = []
    steps: list[tuple[int, int]] = []
    for step in range(-(-max(lengths, default=0) // size)):
        active = [n for n in order if lengths[n] > step * size]
        steps.append((len(starts), len(starts) + len(active)))
        starts += [offsets[n] + step * size for n in active]
        counts += [min(size, lengths[n] - step * size) for n in active]
    start_M = torch.tensor(starts, dtype=torch.int64)[:, None]
    # A short chunk is filled from its end, so that its last row is a token and leaves undecayed.
    skip_M = size - torch.tensor(counts, dtype=torch.int64)[:, None]
    inside_MC = torch.arange(size) >= skip_M
    rows_MC = torch.where(inside_MC, start_M + torch.arange(size) - skip_M, 0)
    pad_R = (~inside_MC).flatten().nonzero().flatten()
    back_T = torch.empty(offsets[-1], dtype=torch.int64)
    back_T[rows_MC[inside_MC]] = inside_MC.flatten().nonzero().flatten()
    return Chunks(
        rows_MC.to(device),
        pad_R.to(device) if len(pad_R) else None,
        back_T.to(device),
        tuple(steps),
        torch.tensor(order, dtype=torch.int64).to(device),
        size,
    )


def chunk_kda(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    g_THK: Tensor,
    beta_TH: Tensor,
    spans: Spans,
    initial_NHKV: Tensor | None,
    bounded: bool,
) -> tuple[Tensor, Tensor]:
    """(o [T, H, V], final state [N, H, K, V]) of normalised, scaled q and k, log-decay g and write
    strength beta.

    All in one dtype, fp32 or fp64. `bounded` promises g >= -5.
    """
    chunks = plan(spans, BOUNDED_CHUNK if bounded else UNBOUNDED_CHUNK)
    heads, width, values = q_THK.shape[1], q_THK.shape[2], v_THV.shape[2]
    if initial_NHKV is None:
        initial_NHKV = q_THK.new_zeros(spans.num_spans, heads, width, values)
    if not chunks.steps:
        return v_THV, initial_NHKV
    with without_autocast(q_THK):
        return _ChunkKDA.apply(q_THK, k_THK, v_THV, g_THK, beta_TH, initial_NHKV, chunks, bounded)


def _cut(x_THx: Tensor, chunks: Chunks) -> Tensor:
    """[T, H, x] -> [M·H, C, x], zero in empty rows."""
    heads, width = x_THx.shape[1], x_THx.shape[2]
    x = x_THx.index_select(0, chunks.rows_MC.flatten())
    if chunks.pad_R is not None:
        x.index_fill_(0, chunks.pad_R, 0.0)
    return x.view(-1, chunks.size, heads, width).transpose(1, 2).flatten(0, 1)


def _join(x_BCx: Tensor, chunks: Chunks, heads: int) -> Tensor:
    """[M·H, C, x] -> [T, H, x]."""
    x = x_BCx.unflatten(0, (-1, heads)).transpose(1, 2).flatten(0, 1)
    return x.index_select(0, chunks.back_T)


class _Inside(NamedTuple):
    """What a chunk knows before it sees a state. All [B, C, ·]."""

    beta: Tensor
    decayed_q: Tensor
    """q·exp(G)."""
    decayed_k: Tensor
    leaving_k: Tensor
    """k·exp(G_C - G)."""
    end: Tensor
    """exp(G_C) [B, K]."""
    A: Tensor
    kk: Tensor
    """L without β, strictly lower."""
    inverse: Tensor
    """(I + L)⁻¹."""
    WU: Tensor
    anchored: tuple[Tensor, ...]
    """With M the middle row's G: exp(G-M), exp(M), q·exp(G-M), k·exp(G-M), k·exp(M-G); empty when
    the decay has no bound."""


def _from_middle(g_BCK: Tensor) -> tuple[Tensor, Tensor]:
    """Cumulative log-decay counted outward from the middle row [B, C, K], and the middle row's own
    [B, 1, K].

    Counted from the first row it would reach -160, and its rounding would be handed on by the
    exponential.
    """
    half = g_BCK.shape[1] // 2
    falling = g_BCK[:, :half].flip(1).cumsum(1).flip(1)
    rising = g_BCK[:, half:].cumsum(1)
    outward = torch.cat([-falling[:, 1:], torch.zeros_like(falling[:, :1]), rising], dim=1)
    return outward, falling[:, :1]


def _inside(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, bounded: bool) -> _Inside:
    outward, middle = _from_middle(g)
    last = outward[:, -1:]
    anchored: tuple[Tensor, ...] = ()
    if bounded:
        rise, lift = outward.exp(), middle.exp()
        anchored = (rise, lift, q * rise, k * rise, k / rise)
        qs, ks, ki = anchored[2:]
        A = torch.bmm(qs, ki.transpose(1, 2)).tril_()
        kk = torch.bmm(ks, ki.transpose(1, 2)).tril_(-1)
        decayed_q, decayed_k = qs * lift, ks * lift
        leaving_k = ki * last.exp()
    else:
        pair = _pairwise(outward)
        A = torch.einsum("bic,bjc,bijc->bij", q, k, pair)
        kk = torch.einsum("bic,bjc,bijc->bij", k, k, pair).tril_(-1)
        fall = g.cumsum(1).exp()
        decayed_q, decayed_k = q * fall, k * fall
        leaving_k = k * (last - outward).exp()
    lower = kk * beta
    lower.diagonal(dim1=1, dim2=2).fill_(1.0)
    eye = torch.eye(lower.shape[1], dtype=lower.dtype, device=lower.device).expand_as(lower)
    inverse = torch.linalg.solve_triangular(lower, eye, upper=False, unitriangular=True)
    WU = torch.bmm(inverse, torch.cat([decayed_k, v], dim=-1).mul_(beta))
    end = (last + middle).squeeze(1).exp()
    return _Inside(beta, decayed_q, decayed_k, leaving_k, end, A, kk, inverse, WU, anchored)


def _pairwise(G_BCK: Tensor) -> Tensor:
    """exp(G_i - G_j) for i >= j, else 0: [B, C, C, K]. Selected before the exponential, which
    would overflow.
    """
    C = G_BCK.shape[1]
    keep = torch.ones(C, C, dtype=torch.bool, device=G_BCK.device).tril()[:, :, None]
    return torch.where(keep, G_BCK[:, :, None] - G_BCK[:, None], float("-inf")).exp()


class _ChunkKDA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THK: Tensor,
        k_THK: Tensor,
        v_THV: Tensor,
        g_THK: Tensor,
        beta_TH: Tensor,
        initial_NHKV: Tensor,
        chunks: Chunks,
        bounded: bool,
    ) -> tuple[Tensor, Tensor]:
        heads, width = q_THK.shape[1], q_THK.shape[2]
        q, k, v, g, beta = (
            _cut(x, chunks) for x in (q_THK, k_THK, v_THV, g_THK, beta_TH[..., None])
        )
        inside = _inside(q, k, v, g, beta, bounded)
        W, U = inside.WU.split((width, v.shape[2]), dim=-1)
        S_BKV = q.new_empty(len(q), width, v.shape[2])
        written = torch.empty_like(v)
        final = initial_NHKV.index_select(0, chunks.order_N)
        for start, stop in chunks.steps:
            rows = slice(start * heads, stop * heads)
            S = final[: stop - start].flatten(0, 1)
            S_BKV[rows] = S
            torch.baddbmm(U[rows], W[rows], S, alpha=-1, out=written[rows])
            S = torch.baddbmm(
                S * inside.end[rows][:, :, None],
                inside.leaving_k[rows].transpose(1, 2),
                written[rows],
            )
            final[: stop - start] = S.unflatten(0, (-1, heads))
        o = torch.bmm(inside.decayed_q, S_BKV).baddbmm_(inside.A, written)
        ctx.save_for_backward(q, k, v, g, S_BKV, written, *inside[:-1], *inside.anchored)
        ctx.chunks, ctx.heads = chunks, heads
        result = torch.empty_like(initial_NHKV)
        result[chunks.order_N] = final
        return _join(o, chunks, heads), result

    @staticmethod
    def backward(ctx: Any, do_THV: Tensor, dfinal_NHKV: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, S, written, *rest = ctx.saved_tensors
        alone = len(_Inside._fields) - 1
        inside = _Inside._make([*rest[:alone], tuple(rest[alone:])])
        chunks, heads = ctx.chunks, ctx.heads
        with without_autocast(q):
            do = _cut(do_THV.contiguous(), chunks)
            dwritten, dS_out, dinitial = _reverse(inside, chunks, heads, S, do, dfinal_NHKV)
            grads = _inside_backward(inside, q, k, v, g, S, written, do, dwritten, dS_out)
        dq, dk, dv, dg, dbeta = (_join(x, chunks, heads) for x in grads)
        return dq, dk, dv, dg, dbeta.squeeze(-1), dinitial, None, None


def _reverse(
    inside: _Inside, chunks: Chunks, heads: int, S: Tensor, do: Tensor, dfinal_NHKV: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The hand-over backwards: gradients of Ṽ, of every chunk's outgoing state, and of the
    initial states.
    """
    width = S.shape[1]
    W = inside.WU[..., :width]
    dwritten = torch.bmm(inside.A.transpose(1, 2), do)
    dS_out = torch.bmm(inside.decayed_q.transpose(1, 2), do)
    carried = dfinal_NHKV.index_select(0, chunks.order_N)
    for start, stop in reversed(chunks.steps):
        rows = slice(start * heads, stop * heads)
        dS = carried[: stop - start].flatten(0, 1)
        dwritten[rows].baddbmm_(inside.leaving_k[rows], dS)
        dS_in = dS_out[rows].addcmul(inside.end[rows][:, :, None], dS)
        dS_in.baddbmm_(W[rows].transpose(1, 2), dwritten[rows], alpha=-1)
        dS_out[rows] = dS
        carried[: stop - start] = dS_in.unflatten(0, (-1, heads))
    dinitial = torch.empty_like(carried)
    dinitial[chunks.order_N] = carried
    return dwritten, dS_out, dinitial


def _inside_backward(
    inside: _Inside,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    S: Tensor,
    written: Tensor,
    do: Tensor,
    dwritten: Tensor,
    dS_out: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g and beta, all [B, C, ·]."""
    width, beta = q.shape[2], inside.beta
    dA = torch.bmm(do, written.transpose(1, 2)).tril_()
    # A_ii holds no decay. Kept apart, so that its two equal shares of dG can't leave their rounding
    # behind.
    ddiagonal = dA.diagonal(dim1=1, dim2=2).unsqueeze(-1)
    dq_same, dk_same = ddiagonal * k, ddiagonal * q
    dA = dA.tril_(-1)
    dq_state = torch.bmm(do, S.transpose(1, 2))
    dleaving = torch.bmm(written, dS_out.transpose(1, 2))
    dend = (dS_out * S).sum(-1)
    dWU = torch.cat([torch.bmm(dwritten, S.transpose(1, 2)).neg_(), dwritten], dim=-1)
    dright = torch.bmm(inside.inverse.transpose(1, 2), dWU)
    dlower = torch.bmm(dright, inside.WU.transpose(1, 2)).neg_().tril_(-1)
    dbeta = (dlower * inside.kk).sum(-1, keepdim=True)
    dbeta += (dright[..., :width] * inside.decayed_k).sum(-1, keepdim=True)
    dbeta += (dright[..., width:] * v).sum(-1, keepdim=True)
    dkk = dlower.mul_(beta)
    dright.mul_(beta)
    dk_state, dv = dright[..., :width], dright[..., width:]
    # Products of a gradient with what it belongs to: q·dq and k·dk give the gradient of the
    # cumulative log-decay.
    leave_G = dleaving * inside.leaving_k
    leave_G[:, -1] = 0.0  # the last row leaves undecayed
    dG = (dq_state * inside.decayed_q).addcmul_(dk_state, inside.decayed_k).sub_(leave_G)
    dG_last = leave_G.sum(1) + dend * inside.end
    if inside.anchored:
        dq, dk, dG_pairs = _anchored_backward(inside, dA, dkk, dq_state, dk_state, dleaving)
    else:
        dq, dk, dG_pairs = _pairwise_backward(q, k, g, dA, dkk, dq_state, dk_state, dleaving)
    dG += dG_pairs
    dG[:, -1] += dG_last
    dg = dG.flip(1).cumsum(1).flip(1)
    return dq.add_(dq_same), dk.add_(dk_same), dv, dg, dbeta


def _anchored_backward(
    inside: _Inside,
    dA: Tensor,
    dkk: Tensor,
    dq_state: Tensor,
    dk_state: Tensor,
    dleaving: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    rise, lift, qs, ks, ki = inside.anchored
    dqs, dks = torch.bmm(dA, ki), torch.bmm(dkk, ki)
    dki = torch.bmm(dA.transpose(1, 2), qs).baddbmm_(dkk.transpose(1, 2), ks)
    dG = (dqs * qs).addcmul_(dks, ks).addcmul_(dki, ki, value=-1)
    dq = dqs.addcmul_(dq_state, lift).mul_(rise)
    drow = dks.addcmul_(dk_state, lift).mul_(rise)
    dcolumn = dki.addcmul_(dleaving, rise[:, -1:]).div_(rise)
    return dq, drow.add_(dcolumn), dG


def _pairwise_backward(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    dA: Tensor,
    dkk: Tensor,
    dq_state: Tensor,
    dk_state: Tensor,
    dleaving: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    outward, _ = _from_middle(g)
    pair = _pairwise(outward)
    dq = torch.einsum("bij,bjc,bijc->bic", dA, k, pair)
    drow = torch.einsum("bij,bjc,bijc->bic", dkk, k, pair)
    dcolumn = torch.einsum("bij,bic,bijc->bjc", dA, q, pair)
    dcolumn += torch.einsum("bij,bic,bijc->bjc", dkk, k, pair)
    dG = (dq * q).addcmul_(drow, k).addcmul_(dcolumn, k, value=-1)
    fall = g.cumsum(1).exp()
    dq.addcmul_(dq_state, fall)
    drow.addcmul_(dk_state, fall)
    dcolumn.addcmul_(dleaving, (outward[:, -1:] - outward).exp())
    return dq, drow.add_(dcolumn), dG
