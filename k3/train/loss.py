"""The loss of one micro-batch, and what a step adds up over micro-batches and ranks.

Legend: T tokens, L attention layers with logits, H heads, N depths of the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3.data.batch import IGNORE, Batch
from k3.model.mtp import MTPLayer
from k3.model.transformer import K3
from k3.ops.cross_entropy import linear_cross_entropy
from k3.parallel.mesh import Mesh


@dataclass(frozen=True)
class Losses:
    """Summed negative log-likelihoods (nats) of a micro-batch, and the statistics of its forward
    passes.
    """

    main: Tensor
    mtp: Tensor | None
    """Of the token after the next; None without an MTP layer."""
    stats: tuple[dict[str, Any], ...]
    """Backbone, then MTP."""


def losses(model: K3, batch: Batch) -> Losses:
    """One forward pass: next-token loss, and the MTP layer's on the same features."""
    head = model.lm_head.weight
    out = model(batch.ids_T, batch.spans)
    main = linear_cross_entropy(model.head_input(out.h_TD), head, batch.targets_T)
    if not len(model.mtp):
        return Losses(main, None, (out.stats,))
    ahead = model.mtp_forward(0, out.h_TD, batch.next_ids_T, batch.spans)
    layer = model.mtp[0]
    assert isinstance(layer, MTPLayer)
    mtp = linear_cross_entropy(layer.head_input(ahead.h_TD), head, batch.targets2_T)
    return Losses(main, mtp, (out.stats, ahead.stats))


def per_token(part: Losses, counts: tuple[int, int], mtp_weight: float) -> Tensor:
    """What to differentiate: each sum over the step's own count of all ranks, so that gradients
    only add up.
    """
    loss = part.main / max(1, counts[0])
    return loss if part.mtp is None else loss + mtp_weight * part.mtp / max(1, counts[1])


def count_targets(batches: Sequence[Batch], mesh: Mesh) -> tuple[int, int]:
    """Next tokens and tokens after the next that the whole step predicts, over all ranks."""
    counts = [
        sum(int((targets != IGNORE).sum()) for targets in column)
        for column in (
            [batch.targets_T for batch in batches],
            [batch.targets2_T for batch in batches],
        )
    ]
    main, mtp = mesh.sum_(torch.tensor(counts, device=mesh.device)).tolist()
    return main, mtp


class StepSums:
    """Sums of one optimizer step: losses, norms by depth, and the largest logit of each head."""

    def __init__(self) -> None:
        self.micro_batches = 0
        self.has_mtp = False
        self.loss_2: Tensor | None = None
        self.norm_N: Tensor | None = None
        self.max_logit_LH: Tensor | None = None

    @torch.no_grad()
    def add(self, part: Losses) -> None:
        zero = torch.zeros_like(part.main)
        loss_2 = torch.stack([part.main, zero if part.mtp is None else part.mtp]).double()
        norm_N = part.stats[0]["output_norm"].double()
        logits = [stats["max_logit"] for stats in part.stats if "max_logit" in stats]
        self.micro_batches += 1
        self.has_mtp = part.mtp is not None
        self.loss_2 = loss_2 if self.loss_2 is None else self.loss_2 + loss_2
        self.norm_N = norm_N if self.norm_N is None else self.norm_N + norm_N
        if logits:
            max_LH = torch.cat(logits).float()
            seen = self.max_logit_LH
            self.max_logit_LH = max_LH if seen is None else torch.maximum(seen, max_LH)

    @torch.no_grad()
    def reduce(self, mesh: Mesh) -> None:
        """Over ranks: sums are summed, the largest logits are the largest of all."""
        assert self.loss_2 is not None and self.norm_N is not None
        count = self.loss_2.new_tensor([float(self.micro_batches)])
        flat = mesh.sum_(torch.cat([self.loss_2, count, self.norm_N]))
        self.loss_2, self.norm_N = flat[:2], flat[3:]
        self.micro_batches = int(flat[2])
        if self.max_logit_LH is not None:
            mesh.max_(self.max_logit_LH)

    def row(self, counts: tuple[int, int]) -> dict[str, Any]:
        """The step's loss, mtp_loss (nats per token), max_logit and output_norm."""
        assert self.loss_2 is not None and self.norm_N is not None
        main, mtp = self.loss_2.tolist()
        logits = self.max_logit_LH
        return {
            "loss": main / max(1, counts[0]),
            "mtp_loss": mtp / max(1, counts[1]) if self.has_mtp else None,
            "max_logit": None if logits is None else float(logits.max()),
            "output_norm": [norm / self.micro_batches for norm in self.norm_N.tolist()],
        }
