"""Quantile Balancing: the router bias that would have given every expert its share of the last
step.

With k of n experts per token and m tokens, an expert's share is q = m k / n tokens. A token reaches
expert j where s_j + b_j beats the token's cutoff, so the bias that lets exactly q tokens in is the
k/n-quantile of r = cutoff - s_j over the tokens. There is no step size. The new bias serves from
the next step on. `histogram` + `bias_from_histogram` is the estimator that adds over micro-batches
and ranks as integers; `bias_exact` sorts; `bias_sign` is the fixed-step rule it replaced.
Source: Kimi K3 report §2.3.3, eq. 14, appendices C and D.

Legend: T tokens, n experts, k experts per token, B bins.
"""

from __future__ import annotations

import torch
from torch import Tensor

BINS = 1000


def histogram(
    scores_Tn: Tensor,
    cutoff_T: Tensor,
    bias_n: Tensor,
    valid_T: Tensor | None = None,
    bins: int = BINS,
) -> Tensor:
    """int64 [n, bins]: per expert, how many valid tokens have r = cutoff - score in each bin.

    scores_Tn are raw (no bias), cutoff_T is the (k+1)-th biased score, `bias_n` the bias that made
    it: it sets the range [min - 1, max + 1], which holds every r of scores in 0..1. Integers, so
    sums over any sharding in any order are identical. Values outside (an infinite cutoff) go to the
    end bins.
    """
    num_experts = scores_Tn.shape[1]
    low, width = _range(bias_n, bins)
    r_Tn = cutoff_T.unsqueeze(1) - scores_Tn.detach()
    bin_Tn = ((r_Tn - low) / width).clamp_(0, bins - 1).to(torch.int64)
    bin_Tn += torch.arange(num_experts, device=bin_Tn.device) * bins
    counts = torch.zeros(num_experts * bins, dtype=torch.int64, device=bin_Tn.device)
    if valid_T is None:
        ones_Tn = torch.ones_like(bin_Tn)
    else:
        ones_Tn = valid_T.to(torch.int64).unsqueeze(1).expand_as(bin_Tn)
    return counts.scatter_add_(0, bin_Tn.flatten(), ones_Tn.flatten()).view(num_experts, bins)


def bias_from_histogram(counts_nB: Tensor, bias_n: Tensor, k: int, n_tokens: int) -> Tensor:
    """The next bias [n], mean zero, from the summed counts of a whole optimizer step.

    `bias_n` is the bias the counts were made with, `n_tokens` the valid tokens counted. The first
    bin whose cumulative count reaches ceil(q) is taken, with a linear step inside it: within one
    bin of the quantile. Without tokens the bias stays. Raises ValueError if the counts are not of
    `n_tokens`.
    """
    num_experts, bins = counts_nB.shape
    if n_tokens == 0:
        return bias_n.clone()
    cumulative_nB = counts_nB.cumsum(1)
    total_n = cumulative_nB[:, -1]
    if not bool((total_n == n_tokens).all()):
        raise ValueError(
            f"histogram holds {total_n.tolist()[:8]} tokens per expert, not {n_tokens}"
        )
    share = -(-n_tokens * k // num_experts)
    bin_n1 = (cumulative_nB < share).sum(1, keepdim=True)
    inside_n1 = counts_nB.gather(1, bin_n1)
    before_n1 = cumulative_nB.gather(1, bin_n1) - inside_n1
    part_n1 = (n_tokens * k / num_experts - before_n1.double()) / inside_n1
    low, width = _range(bias_n.double(), bins)
    new_n = (low + (bin_n1 + part_n1.clamp_(0, 1)) * width).squeeze(1)
    return _centred(new_n).to(bias_n.dtype)


def bias_exact(scores_Tn: Tensor, cutoff_T: Tensor, k: int) -> Tensor:
    """The next bias [n], mean zero: minus the (q+1)-th largest margin score - cutoff of each
    expert.

    scores_Tn are raw, cutoff_T is the (k+1)-th biased score; valid tokens only, all of the step.
    When q is not whole its floor is meant.
    """
    tokens, num_experts = scores_Tn.shape
    if tokens == 0:
        return scores_Tn.new_zeros(num_experts)
    rank = min(tokens * k // num_experts + 1, tokens)
    r_Tn = cutoff_T.unsqueeze(1) - scores_Tn.detach()
    return _centred(r_Tn.kthvalue(rank, dim=0).values.double()).to(scores_Tn.dtype)


def bias_sign(bias_n: Tensor, load_n: Tensor, step: float) -> Tensor:
    """The fixed-step rule, mean zero: up by `step` below the mean load, down above it."""
    load_n = load_n.to(torch.float64)
    return _centred(bias_n.double() + step * torch.sign(load_n.mean() - load_n)).to(bias_n.dtype)


def _centred(bias_n: Tensor) -> Tensor:
    """Selection does not see a constant, so the mean is free: zero keeps the range of bins in
    place."""
    return bias_n - bias_n.mean()


def _range(bias_n: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """(lower end, bin width) of the histogram under a bias."""
    low, high = torch.aminmax(bias_n.detach())
    # divided by a tensor: by a number, CUDA multiplies with the reciprocal, and edges would differ
    return low - 1, (high - low + 2) / torch.full_like(high, bins)
