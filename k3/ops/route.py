"""Which experts a token visits, and with what weight.

Legend: T tokens, n experts, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Route:
    """indices_Tk int64, best first; weights_Tk fp32; cutoff_T fp32, the (k+1)-th biased score (-inf
    when n == k)."""

    indices_Tk: Tensor
    weights_Tk: Tensor
    cutoff_T: Tensor


def route(
    scores_Tn: Tensor,
    bias_n: Tensor,
    k: int,
    *,
    routes_Tk: Tensor | None = None,
    renormalize: bool = True,
    scale: float = 1.0,
    check: bool = True,
) -> Route:
    """The k largest of scores + bias, weighed by the scores without the bias.

    scores_Tn fp32 (sigmoid outputs), bias_n fp32. Equal biased scores go to the lower index, on
    every device. With `renormalize` and k > 1, weights are divided by their sum + 1e-20 (a single
    weight keeps its score, as in the released code: divided by itself it would be 1 and teach the
    router nothing); then times `scale`.
    `routes_Tk` int64 forces the experts: their weights are still gathered from the dense scores, so
    they carry gradients. The bias takes no gradient. `check` refuses a row that is not finite, at
    the price of one host synchronisation on a GPU. Raises ValueError naming the first bad row; on k
    outside 1..n; on shapes that do not fit. Source: Kimi K3 report §2.3.3, eq. 13.
    """
    num_experts = scores_Tn.shape[-1]
    if not 1 <= k <= num_experts:
        raise ValueError(f"top-k must lie in 1..{num_experts} experts, got {k}")
    if bias_n.shape != (num_experts,):
        raise ValueError(f"bias {tuple(bias_n.shape)} does not fit {num_experts} experts")
    biased_Tn = scores_Tn.detach().float() + bias_n.detach().float()
    if check:
        _refuse_bad_rows(scores_Tn, biased_Tn)
    top_T, index_T = _top(biased_Tn, min(k + 1, num_experts))
    cutoff_T = top_T[:, k] if k < num_experts else torch.full_like(top_T[:, 0], -torch.inf)
    indices_Tk = index_T[:, :k] if routes_Tk is None else _forced(routes_Tk, scores_Tn, k)
    weights_Tk = scores_Tn.gather(1, indices_Tk)
    if renormalize and k > 1:
        weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdim=True) + 1e-20)
    return Route(indices_Tk, weights_Tk if scale == 1.0 else weights_Tk * scale, cutoff_T)


def _top(biased_Tn: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row in falling order, exact ties by lower index.

    torch.topk leaves ties open, so it sorts unique integers: the high half orders like the float,
    the low half counts down with the index. An epsilon per index would reorder scores that are
    close but not equal.
    """
    num_experts = biased_Tn.shape[-1]
    bits_Tn = (biased_Tn + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    ordered_Tn = torch.where(bits_Tn < 0, bits_Tn ^ 0x7FFFFFFF, bits_Tn).to(torch.int64)
    tie_n = torch.arange(num_experts - 1, -1, -1, device=biased_Tn.device)
    key_Tk = ((ordered_Tn << 32) | tie_n).topk(count, dim=-1).values
    index_Tk = (num_experts - 1) - (key_Tk & 0xFFFFFFFF)
    return biased_Tn.gather(1, index_Tk), index_Tk


def _forced(routes_Tk: Tensor, scores_Tn: Tensor, k: int) -> Tensor:
    if routes_Tk.shape != (scores_Tn.shape[0], k):
        raise ValueError(
            f"forced routes {tuple(routes_Tk.shape)} must be {(scores_Tn.shape[0], k)}"
        )
    return routes_Tk.to(torch.int64)


def _refuse_bad_rows(scores_Tn: Tensor, biased_Tn: Tensor) -> None:
    """One sum tells whether to look closer: an infinite bias (an expert switched off) is allowed, a
    NaN never."""
    if bool(torch.isfinite(biased_Tn.sum())):
        return
    bad_T = ~torch.isfinite(scores_Tn).all(-1) | torch.isnan(biased_Tn).any(-1)
    if bool(bad_T.any()):
        row = int(bad_T.nonzero()[0, 0])
        raise ValueError(
            f"router scores of token {row} are not finite ({int(bad_T.sum())} such rows)"
        )
