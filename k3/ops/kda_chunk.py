"""Kimi Delta Attention in chunks: dense products inside a chunk, one state hand-over between
chunks, and a backward pass of its own.

With G the cumulative log-decay of a chunk's rows, q and k of unit length:

    A_ij = Σ_c q_ic k_jc exp(G_ic - G_jc)  for i >= j          N_ij the same with k_i, for i > j
    R = (I + diag(β) N)⁻¹ diag(β)          W = R (k ⊙ exp G)          U = R v
    Ṽ = U - W S_in     o = scale · ((q ⊙ exp G) S_in + A Ṽ)
    S_out = diag(exp G_C) S_in + (k ⊙ exp(G_C - G))ᵀ Ṽ

The bounded decay makes A and N plain products: a log-decay of at least -5 a token keeps the
exponents of 32 rows within ±80 of the middle row M, inside fp32's ±88, so
(q ⊙ exp(G-M)) (k ⊙ exp(M-G))ᵀ needs no tiles. Entries above the diagonal may overflow there; they
are selected away, never multiplied. Without a bound the differences G_i - G_j are exponentiated
pair by pair, in chunks of 16.

Work runs over blocks of chunks small enough for the cache. Within a block everything but the
hand-over is one batch over chunks, spans and heads; the states that one step of the hand-over
leaves behind lie where the next step reads them.

Legend: T tokens, N spans, H heads, M chunks, B = M·H, C rows per chunk, K key width, V value
width; x2C: q rows over k rows (or o rows over v rows).
Source: Kimi K3 report eq. 3-4; the derivation of the backward pass is ours.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from k3.ops.kda_plan import Block, Plan, cut, make_plan
from k3.ops.kda_ref import L2_EPS, MAX_A_LOG
from k3.ops.product import wide, without_autocast
from k3.ops.spans import Spans

BOUNDED_CHUNK = 32
UNBOUNDED_CHUNK = 16
BLOCK_ELEMENTS = 1 << 18
"""Elements of one [B, C, K] tensor of a block, of which a dozen share a CPU's cache; a GPU takes 64
times as many."""


def chunk_kda(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    z_THK: Tensor,
    b_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    spans: Spans,
    initial_NHKV: Tensor | None,
    lower_bound: float | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(o [T, H, V] in v's dtype, final state [N, H, K, V]); arguments as `k3.ops.kda.kda`."""
    dtype = wide(torch.promote_types(q_THK.dtype, A_log_H.dtype))
    _, heads, width = q_THK.shape
    size = UNBOUNDED_CHUNK if lower_bound is None else BOUNDED_CHUNK
    if not spans.num_tokens:
        state = q_THK.new_zeros(spans.num_spans, heads, width, v_THV.shape[2], dtype=dtype)
        return v_THV, state if initial_NHKV is None else initial_NHKV.to(dtype)
    elements = BLOCK_ELEMENTS if spans.device.type == "cpu" else 64 * BLOCK_ELEMENTS
    limit = max(1, elements // (size * max(width, v_THV.shape[2])))
    plan = make_plan(spans.lengths, heads, size, limit, spans.device)
    inputs = (q_THK, k_THK, v_THV, z_THK, b_TH, A_log_H, dt_bias_HK, initial_NHKV)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    with without_autocast(q_THK):
        return _ChunkKDA.apply(*inputs, plan, lower_bound, scale, dtype, keep)


@dataclass(eq=False)
class _Inside:
    """What the backward pass needs of a block."""

    unit_B2CK: Tensor
    """q and k of unit length."""
    shrink_B2C1: Tensor
    """1 / sqrt(Σ x² + eps) of q and k."""
    x_BCK: Tensor
    """z + dt_bias."""
    g_BCK: Tensor
    beta_BC: Tensor
    stop_BC: Tensor
    """1 - beta."""
    AR_B2CC: Tensor
    QW_B2CK: Tensor
    """q ⊙ exp G, and -W."""
    leaving_BCK: Tensor
    """k ⊙ exp(G_C - G)."""
    end_BK1: Tensor
    """exp G_C."""
    OV_B2CV: Tensor
    """(q ⊙ exp G) S_in, and Ṽ."""
    S_BKV: Tensor
    rise_BCK: Tensor
    """exp(G - M); the decay itself if it is not bounded."""
    lift_BxK: Tensor
    """exp M [B, 1, K]; exp G [B, C, K] if the decay is not bounded."""


class _ChunkKDA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THK: Tensor,
        k_THK: Tensor,
        v_THV: Tensor,
        z_THK: Tensor,
        b_TH: Tensor,
        A_log_H: Tensor,
        dt_bias_HK: Tensor,
        initial_NHKV: Tensor | None,
        plan: Plan,
        bound: float | None,
        scale: float,
        dtype: torch.dtype,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        T, H, V = v_THV.shape
        shape = (len(plan.order_R) // H, H, q_THK.shape[2], V)
        slope_H11 = A_log_H.to(dtype).clamp(max=MAX_A_LOG).exp().view(H, 1, 1)
        if initial_NHKV is None:
            S = q_THK.new_zeros(shape, dtype=dtype).flatten(0, 1)
        else:
            S = initial_NHKV.to(dtype).flatten(0, 1).index_select(0, plan.order_R)
        final = torch.empty_like(S)
        final[plan.blocks[0].steps[0][1] :] = S[plan.blocks[0].steps[0][1] :]
        o_RV = S.new_empty(plan.blocks[-1].stop * plan.size, V)
        kept: list[Tensor] = []
        for block in plan.blocks:
            q, k, v, z, b = (
                cut(x, plan, block, dtype) for x in (q_THK, k_THK, v_THV, z_THK, b_TH[..., None])
            )
            x = z.view(-1, H, *z.shape[1:]).add_(dt_bias_HK.to(dtype)[:, None])
            inside, U = _inside(q, k, v, x, b, slope_H11, block, bound)
            inside.S_BKV, S = _hand_over(inside, U, S, final, block)
            Q_S, written = inside.OV_B2CV.unbind(1)
            o = o_RV[block.start * plan.size : block.stop * plan.size].view_as(written)
            torch.baddbmm(Q_S, inside.AR_B2CC[:, 0], written, beta=scale, alpha=scale, out=o)
            if keep:
                kept += [getattr(inside, f.name) for f in fields(inside)]
        ctx.save_for_backward(slope_H11, A_log_H, *kept)
        ctx.plan, ctx.bound, ctx.scale, ctx.shape = plan, bound, scale, shape
        ctx.dtypes = tuple(x.dtype for x in (q_THK, k_THK, v_THV, z_THK, b_TH))
        ctx.has_initial = initial_NHKV is not None
        result = torch.empty_like(final)
        result[plan.order_R] = final
        o_THV = o_RV.index_select(0, plan.back_R).view(T, H, V)
        return o_THV.to(v_THV.dtype), result.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_THV: Tensor, dfinal_NHKV: Tensor) -> tuple[Tensor | None, ...]:
        slope_H11, A_log_H, *kept = ctx.saved_tensors
        plan, bound, scale = ctx.plan, ctx.bound, ctx.scale
        N, H, K, V = ctx.shape
        rows = plan.blocks[-1].stop * plan.size
        grads = [slope_H11.new_empty(rows, width) for width in (K, K, V, K, 1)]
        dA_log, ddt_bias = torch.zeros_like(slope_H11), slope_H11.new_zeros(H, 1, K)
        dfinal = dfinal_NHKV.flatten(0, 1).index_select(0, plan.order_R)
        dS, count = dfinal[:0], len(fields(_Inside))
        with without_autocast(do_THV):
            for n, block in reversed(list(enumerate(plan.blocks))):
                inside = _Inside(*kept[n * count : (n + 1) * count])
                dO = cut(do_THV, plan, block, slope_H11.dtype)
                dOV, dS_out, dS = _hand_back(inside, dO, dS, dfinal, block, scale)
                part = slice(block.start * plan.size, block.stop * plan.size)
                dq, dk, dv, dz, db = (x[part].view(-1, plan.size, x.shape[1]) for x in grads)
                dg = _inside_backward(inside, dOV, dS_out, bound, (dq, dk, dv, db))
                dA, dt = _gate_backward(inside, dg, slope_H11, block, bound, dz)
                dA_log += dA
                ddt_bias += dt
        dq, dk, dv, dz, db = (
            x.index_select(0, plan.back_R).view(-1, H, x.shape[1]).to(dtype)
            for x, dtype in zip(grads, ctx.dtypes, strict=True)
        )
        dinitial = None
        if ctx.has_initial:
            dinitial = torch.empty_like(dfinal)
            dinitial[plan.order_R] = torch.cat([dS, dfinal[len(dS) :]])
            dinitial = dinitial.view(ctx.shape)
        dA_log_H = torch.where(A_log_H > MAX_A_LOG, 0.0, dA_log.view(H)).to(A_log_H.dtype)
        return (
            *(dq, dk, dv, dz, db.squeeze(-1)),
            *(dA_log_H, ddt_bias.squeeze(1), dinitial),
            *(None,) * 5,
        )


def _inside(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x_MHCK: Tensor,
    b: Tensor,
    slope_H11: Tensor,
    block: Block,
    bound: float | None,
) -> tuple[_Inside, Tensor]:
    """All of a block that needs no state, and U [B, C, V]."""
    B, C, K = q.shape
    norm_B2C1 = torch.stack([_norm(q), _norm(k)], dim=1)
    shrink = norm_B2C1.square_().add_(L2_EPS).rsqrt_()
    unit = q.new_empty(B, 2, C, K)
    torch.mul(q, shrink[:, 0], out=unit[:, 0])
    torch.mul(k, shrink[:, 1], out=unit[:, 1])
    beta, stop = b.sigmoid(), b.neg().sigmoid_()
    if bound is None:
        g = F.softplus(x_MHCK).mul_(-slope_H11).flatten(0, 1)
    else:
        g = (x_MHCK * slope_H11).sigmoid_().mul_(bound).flatten(0, 1)
    if block.empty_R is not None:
        g.view(-1, K).index_fill_(0, block.empty_R, 0.0)
        beta.view(-1).index_fill_(0, block.empty_R, 0.0)
    alpha = g.exp()
    QW = torch.empty_like(unit)
    if bound is None:
        rise, lift = alpha, _running_product(alpha)
        pair = _pairs(alpha)
        AN = _pair_products(unit, pair)
        torch.mul(unit, lift[:, None], out=QW)
        leaving, end = unit[:, 1] * pair[:, -1], lift[:, -1]
    else:
        rise, lift = _from_middle(alpha)
        risen, sunk = unit * rise[:, None], unit[:, 1] / rise
        AN = torch.bmm(risen.view(B, 2 * C, K), sunk.transpose(1, 2))
        AN = AN.view(B, 2, C, C).tril_()
        torch.mul(risen, lift[:, None], out=QW)
        leaving, end = sunk.mul_(rise[:, -1:]), rise[:, -1:] * lift
    R = _resolvent_(AN[:, 1], beta)
    torch.neg(torch.bmm(R, QW[:, 1]), out=QW[:, 1])
    OV = q.new_empty(B, 2, C, v.shape[2])
    beta, stop = beta.squeeze(-1), stop.squeeze(-1)
    inside = _Inside(
        *(unit, shrink, x_MHCK.flatten(0, 1), g, beta, stop),
        *(AN, QW, leaving, end.view(B, K, 1), OV, OV, rise, lift),
    )
    return inside, torch.bmm(R, v)


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def _resolvent_(N: Tensor, beta: Tensor) -> Tensor:
    """N, whose diagonal is not read, becomes (I + diag(β) N)⁻¹ diag(β)."""
    lower = N * beta
    lower.diagonal(dim1=1, dim2=2).fill_(1.0)
    eye = torch.eye(lower.shape[1], dtype=lower.dtype, device=lower.device).expand_as(lower)
    R = torch.linalg.solve_triangular(lower, eye, upper=False, unitriangular=True)
    return torch.mul(R, beta.transpose(1, 2), out=N)


def _from_middle(alpha_BCK: Tensor) -> tuple[Tensor, Tensor]:
    """exp(G - M) [B, C, K] and exp M [B, 1, K], M the cumulative log-decay of the row before the
    middle.

    A chain of products, not the exponential of a sum: the rounding of a sum near 80 would be an
    error of 4e-6 in every entry of A, while errors of the chain cancel in exp(G_i - G_j).
    """
    rise = torch.empty_like(alpha_BCK)
    factors, rows = alpha_BCK.unbind(1), rise.unbind(1)
    middle = len(rows) // 2 - 1
    rows[middle].fill_(1.0)
    for i in range(middle, 0, -1):
        torch.div(rows[i], factors[i], out=rows[i - 1])
    for i in range(middle + 1, len(rows)):
        torch.mul(rows[i - 1], factors[i], out=rows[i])
    return rise, (factors[0] / rows[0])[:, None]


def _running_product(alpha_BCK: Tensor) -> Tensor:
    """exp G [B, C, K]."""
    fall = alpha_BCK.clone()
    rows = fall.unbind(1)
    for i in range(1, len(rows)):
        rows[i].mul_(rows[i - 1])
    return fall


def _suffix_sums_(x_BCK: Tensor) -> Tensor:
    """Each row plus all later rows, in place."""
    rows = x_BCK.unbind(1)
    for i in range(len(rows) - 2, -1, -1):
        rows[i].add_(rows[i + 1])
    return x_BCK


def _prefix_sums_(x_BCK: Tensor) -> Tensor:
    """Each row plus all earlier rows, in place."""
    rows = x_BCK.unbind(1)
    for i in range(1, len(rows)):
        rows[i].add_(rows[i - 1])
    return x_BCK


def _hand_over(
    inside: _Inside, U: Tensor, S: Tensor, final: Tensor, block: Block
) -> tuple[Tensor, Tensor]:
    """Walks the block's steps from the states S. Fills OV, and `final` where a span ends.

    Returns the states that enter each chunk [B, K, V] and those after the last step.
    """
    B, _, C, V = inside.OV_B2CV.shape
    QW, OV = inside.QW_B2CK.view(B, 2 * C, -1), inside.OV_B2CV.view(B, 2 * C, V)
    inside.OV_B2CV[:, 0].zero_()
    inside.OV_B2CV[:, 1] = U
    count = block.steps[0][1]
    states = S.new_empty(B + count, *S.shape[1:])
    states[:count] = S[:count]
    written_BVC = inside.OV_B2CV[:, 1]
    leaving_BKC = inside.leaving_BCK.transpose(1, 2)
    for (start, stop), following in zip(block.steps, block.following, strict=True):
        S = states[start:stop]
        OV[start:stop].baddbmm_(QW[start:stop], S)
        after = states[stop : stop + stop - start]
        torch.mul(S, inside.end_BK1[start:stop], out=after)
        after.baddbmm_(leaving_BKC[start:stop], written_BVC[start:stop])
        final[following : stop - start] = after[following:]
        S = after
    return states[:B], S


def _hand_back(
    inside: _Inside, dO: Tensor, dS: Tensor, dfinal: Tensor, block: Block, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The hand-over backwards from dS, the gradient of the states after the last step.

    Returns the gradients of scale·o and Ṽ [B, 2, C, V], of the states that leave each chunk
    [B, K, V], and of the states that enter the block.
    """
    B, _, C, V = inside.OV_B2CV.shape
    dOV = torch.empty_like(inside.OV_B2CV)
    torch.mul(dO, scale, out=dOV[:, 0])
    from_o = torch.bmm(inside.AR_B2CC[:, 0].transpose(1, 2), dOV[:, 0])
    flat, QW_BK2C = dOV.view(B, 2 * C, V), inside.QW_B2CK.view(B, 2 * C, -1).transpose(1, 2)
    leaves = torch.empty_like(inside.S_BKV)
    steps = list(zip(block.steps, block.following, strict=True))
    leaves[steps[-1][0][0] : steps[-1][0][0] + len(dS)] = dS
    for n, ((start, stop), following) in reversed(list(enumerate(steps))):
        leaves[start + following : stop] = dfinal[following : stop - start]
        out = leaves[start:stop]
        dOV[start:stop, 1] = torch.baddbmm(from_o[start:stop], inside.leaving_BCK[start:stop], out)
        if n:
            before = steps[n - 1][0][0]
            dS = leaves[before : before + stop - start]
        else:
            dS = torch.empty_like(out)
        torch.mul(out, inside.end_BK1[start:stop], out=dS)
        dS.baddbmm_(QW_BK2C[start:stop], flat[start:stop])
    return dOV, leaves, dS


def _inside_backward(
    inside: _Inside,
    dOV: Tensor,
    leaves: Tensor,
    bound: float | None,
    out: tuple[Tensor, Tensor, Tensor, Tensor],
) -> Tensor:
    """Writes the gradients of q, k, v and b [B, C, ·] to `out`; returns that of g [B, C, K]."""
    dq, dk, dv, db = out
    B, _, C, V = dOV.shape
    written, unit = inside.OV_B2CV[:, 1], inside.unit_B2CK
    torch.bmm(inside.AR_B2CC[:, 1].transpose(1, 2), dOV[:, 1], out=dv)
    # dβ = Σ dv·Ṽ / β²; where β underflows, its logit has no gradient left.
    tiny = torch.finfo(dv.dtype).tiny
    db[..., 0] = (dv * written).sum(-1) / inside.beta_BC.clamp_min(tiny) * inside.stop_BC
    torch.neg(dv, out=dOV[:, 1])
    flat = dOV.view(B, 2 * C, V)
    dAN = torch.bmm(flat, written.transpose(1, 2)).view(B, 2, C, C)
    # A_ii holds no decay. Kept apart, so that its two equal shares of dG can't leave their
    # rounding behind.
    own_BC1 = dAN[:, 0].diagonal(dim1=1, dim2=2).unsqueeze(-1).clone()
    dAN.tril_(-1)
    ddecayed = torch.bmm(flat, inside.S_BKV.transpose(1, 2)).view_as(unit)
    dleaving = torch.bmm(written, leaves.transpose(1, 2))
    backward = _pairwise_backward if bound is None else _anchored_backward
    drow, dcolumn, along_B2C, dg = backward(inside, dAN, ddecayed, dleaving)
    # A row's key decays on its way out by the rows after it, the state by all.
    leave = dleaving.mul_(inside.leaving_BCK)
    along_B2C[:, 1] += leave.sum(-1)
    dg[:, 1:] += _prefix_sums_(leave)[:, :-1]
    dg += (leaves * inside.S_BKV).sum(-1).mul_(inside.end_BK1.squeeze(-1))[:, None]
    along_B2C += (own_BC1.squeeze(-1) * inside.AR_B2CC[:, 0].diagonal(dim1=1, dim2=2))[:, None]
    drow[:, 0].addcmul_(own_BC1, unit[:, 1])
    drow[:, 1].add_(dcolumn).addcmul_(own_BC1, unit[:, 0])
    drow.addcmul_(unit, along_B2C[..., None], value=-1)
    torch.mul(drow[:, 0], inside.shrink_B2C1[:, 0], out=dq)
    torch.mul(drow[:, 1], inside.shrink_B2C1[:, 1], out=dk)
    return dg


def _gate_backward(
    inside: _Inside,
    dg: Tensor,
    slope_H11: Tensor,
    block: Block,
    bound: float | None,
    dz: Tensor,
) -> tuple[Tensor, Tensor]:
    """Writes the gradient of z; returns those of A_log [H, 1, 1] and of dt_bias [H, 1, K]."""
    B, C, K = dg.shape
    if block.empty_R is not None:
        dg.view(-1, K).index_fill_(0, block.empty_R, 0.0)
    shape = (B // len(slope_H11), len(slope_H11), C, K)
    dg, g, x, dz = (y.view(shape) for y in (dg, inside.g_BCK, inside.x_BCK, dz))
    if bound is None:
        dA = (dg * g).sum((0, 2, 3)).view_as(slope_H11)
        torch.mul(dg.mul_(x.sigmoid()), -slope_H11, out=dz)
    else:
        # bound·σ'(y) = g·σ(-y), since 1 - σ(y) has no digits left at a saturated gate.
        dy = dg.mul_(g).mul_((x * -slope_H11).sigmoid_())
        dA = (dy * x).sum((0, 2, 3)).view_as(slope_H11) * slope_H11
        torch.mul(dy, slope_H11, out=dz)
    return dA, dz.sum((0, 2)).unsqueeze(1)


def _anchored_backward(
    inside: _Inside, dAN: Tensor, ddecayed: Tensor, dleaving: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q and k as rows of A, N and the decayed rows [B, 2, C, K], of k as their column
    and as leaving [B, C, K]; their products with q and k, but for leaving, summed over channels
    [B, 2, C]; gradient of the log-decay [B, C, K] by all but leaving keys and the end.
    """
    unit, rise = inside.unit_B2CK, inside.rise_BCK
    B, _, C, K = unit.shape
    risen, sunk, flat = unit * rise[:, None], unit[:, 1] / rise, dAN.view(B, 2 * C, C)
    drow = torch.bmm(flat, sunk).view_as(unit)
    drow.addcmul_(ddecayed, inside.lift_BxK[:, None]).mul_(rise[:, None])
    dcolumn = torch.bmm(flat.transpose(1, 2), risen.view(B, 2 * C, K))
    rows, columns = torch.mul(drow, unit, out=risen), sunk.mul_(dcolumn)
    along = rows.sum(-1)
    along[:, 1] += columns.sum(-1)
    # exp(G_i - G_j) gains by G_i what it loses by G_j; what lies wholly after a row cancels.
    dg = _suffix_sums_(torch.add(rows[:, 0], rows[:, 1]).sub_(columns))
    dcolumn.addcmul_(dleaving, rise[:, -1:]).div_(rise)
    return drow, dcolumn, along, dg


def _pairs(alpha_BCK: Tensor) -> Tensor:
    """exp(G_i - G_j) for i >= j, else 0: [B, C, C, K]. Products of decays, so nothing overflows."""
    B, C, K = alpha_BCK.shape
    pair = alpha_BCK.new_zeros(B, C, C, K)
    pair.diagonal(dim1=1, dim2=2).fill_(1.0)
    for i in range(1, C):
        torch.mul(pair[:, i - 1, :i], alpha_BCK[:, i, None], out=pair[:, i, :i])
    return pair


def _pair_products(unit_B2CK: Tensor, pair: Tensor) -> Tensor:
    """A and N [B, 2, C, C]."""
    columns = pair * unit_B2CK[:, None, 1]
    return torch.matmul(columns, unit_B2CK.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).contiguous()


def _pairwise_backward(
    inside: _Inside, dAN: Tensor, ddecayed: Tensor, dleaving: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `_anchored_backward`, but nothing cancels: a row's decay is in the pairs around it."""
    unit, pair = inside.unit_B2CK, _pairs(inside.rise_BCK)
    k = unit[:, 1]
    drow = torch.einsum("bsij,bijc->bsic", dAN, pair * k[:, None])
    ddecayed = ddecayed * inside.lift_BxK[:, None]
    dpair = torch.einsum("bsij,bsic->bijc", dAN, unit).mul_(pair)
    dcolumn = dpair.sum(1)
    drow += ddecayed
    along = (drow * unit).sum(-1)
    along[:, 1] += (dcolumn * k).sum(-1)
    dcolumn.addcmul_(dleaving, pair[:, -1])
    dg = _suffix_sums_(ddecayed.mul_(unit).sum(1))
    around = dpair.mul_(k[:, None])
    for i in range(len(k[0]) - 1, 0, -1):
        if i + 1 < len(k[0]):
            around[:, i, :i] += around[:, i + 1, :i]
        dg[:, i] += around[:, i, :i].sum(1)
    return drow, dcolumn, along, dg
