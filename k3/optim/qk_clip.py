"""QK-clip: after a step, shrink the query and key rows of every head whose largest logit passed the
limit.

A logit is q_nope . k_nope + q_shared . k_shared, where the shared key serves all heads. The head's
q_nope and k_nope rows are multiplied by sqrt(gamma) and its q_shared rows by gamma, so that every
logit of the head falls by exactly gamma and the shared key stays as it is. Which rows those are is
the model's to say (`ParamFacts.clip`).

Legend: L attention layers that report logits, H heads.
Sources: Kimi K2 report (MuonClip); Kimi K3 report §3.3 keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from k3.ops.facts import ParamFacts


@torch.no_grad()
def qk_clip_(
    named_params: Iterable[tuple[str, Tensor]],
    facts: Mapping[str, ParamFacts],
    max_logit_LH: Tensor,
    tau: float,
) -> Tensor:
    """Scales the rows in place and returns gamma_LH = min(1, tau / max_logit), 1 where nothing was
    clipped.

    `max_logit_LH` is the largest logit of each head over the whole step (all micro-batches and
    ranks). Heads within the limit are multiplied by exactly one: their bits do not change.
    """
    gamma_LH = torch.where(max_logit_LH > tau, tau / max_logit_LH, 1.0)
    if bool((gamma_LH == 1.0).all()):
        return gamma_LH
    for name, param in named_params:
        fact = facts[name]
        if fact.logits is not None and fact.clip:
            gamma_H = gamma_LH[fact.logits]
            rows = [count for count, _ in fact.clip]
            heads = param.view(len(gamma_H), sum(rows), param.shape[1])
            for part, (_, power) in zip(heads.split(rows, dim=1), fact.clip, strict=True):
                if power:
                    part.mul_((gamma_H**power).to(param.dtype)[:, None, None])
    return gamma_LH
