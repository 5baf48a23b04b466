"""The router bias of every expert layer, moved once per optimizer step from counts of the whole
step.

The model's forward changes nothing: it returns integers (expert loads and histograms of routing
margins). This file adds them over micro-batches, sums them over ranks in one all-reduce for all
layers, and writes the new biases, which take effect at the next step. Evaluation and recomputation
never call it, so they cannot move a bias.

Legend: L expert layers (backbone, then MTP), n experts, B bins, T tokens.
Source: Kimi K3 report §2.3.3, appendices C and D.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3.ops.quantile import bias_exact, bias_from_histogram, bias_sign

Reduce = Callable[[Tensor], Any]
"""Sums a tensor over ranks, in place."""
Gather = Callable[[Tensor], Tensor]
"""Rows of all ranks, in rank order."""


@dataclass(frozen=True)
class Load:
    """How evenly one step's tokens fell on the experts."""

    max_over_mean: float
    """The worst layer's most loaded expert over the mean expert."""
    idle_share: float
    """Share of all experts, over layers, that got no token."""

    def row(self) -> dict[str, float]:
        """The two as metrics."""
        return {"load_max_over_mean": self.max_over_mean, "idle_share": self.idle_share}

    @classmethod
    def of(cls, load_Ln: Tensor) -> Load:
        load = load_Ln.double()
        ratio_L = load.amax(1) / load.mean(1).clamp(min=1e-9)
        return cls(float(ratio_L.max()), float((load_Ln == 0).double().mean()))


class Balancer:
    """Collects a step's statistics, then moves the biases in place."""

    def __init__(
        self,
        biases: Sequence[Tensor],
        kind: str,
        k: int,
        *,
        bins: int = 1000,
        sign_step: float = 1e-2,
    ) -> None:
        """`biases`: fp32 [n] per expert layer, in the order of the statistics. `kind` as in
        `MoEConfig.balance`.
        """
        self.biases = list(biases)
        self.kind, self.k, self.bins, self.sign_step = kind, k, bins, sign_step
        for bias in self.biases:
            assert bias.dtype == torch.float32, f"router bias must stay float32, is {bias.dtype}"
        self._clear()

    def _clear(self) -> None:
        self.load_Ln: Tensor | None = None
        self.counts_LnB: Tensor | None = None
        self.margins: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.biases]

    @torch.no_grad()
    def add(self, *stats: Mapping[str, Any]) -> None:
        """One micro-batch: the backbone's statistics, then those of the MTP layers; their layers
        are the biases'.
        """
        if not self.biases:
            return
        load_Ln = torch.cat([part["expert_load"] for part in stats])
        assert len(load_Ln) == len(self.biases), (load_Ln.shape, len(self.biases))
        self.load_Ln = _plus(self.load_Ln, load_Ln)
        if self.kind == "quantile":
            self.counts_LnB = _plus(
                self.counts_LnB, torch.cat([part["histogram"] for part in stats])
            )
        if self.kind == "quantile_exact":
            new = [pair for part in stats for pair in part["margins"]]
            for kept, (scores_Tn, cutoff_T) in zip(self.margins, new, strict=True):
                kept.append((scores_Tn.detach(), cutoff_T.detach()))

    @torch.no_grad()
    def step(self, all_reduce: Reduce | None = None, gather: Gather | None = None) -> Load | None:
        """Moves the biases and forgets the step's statistics. None where the model has no experts.

        Over several ranks, `all_reduce` is called once, on one int64 tensor; `gather` only by
        quantile_exact.
        """
        if not self.biases:
            return None
        assert self.load_Ln is not None, "step() before any add()"
        load_Ln, counts_LnB = self._reduced(all_reduce)
        for layer, bias_n in enumerate(self.biases):
            if self.kind == "quantile":
                assert counts_LnB is not None
                tokens = int(counts_LnB[layer, 0].sum())
                if tokens:
                    bias_n.copy_(bias_from_histogram(counts_LnB[layer], bias_n, self.k, tokens))
            elif self.kind == "quantile_exact":
                self._exact(layer, bias_n, gather)
            elif self.kind == "sign":
                bias_n.copy_(bias_sign(bias_n, load_Ln[layer], self.sign_step))
        self._clear()
        return Load.of(load_Ln)

    def _reduced(self, all_reduce: Reduce | None) -> tuple[Tensor, Tensor | None]:
        """The loads and histograms of all ranks, exchanged as one flat tensor."""
        assert self.load_Ln is not None
        if all_reduce is None:
            return self.load_Ln, self.counts_LnB
        parts = [self.load_Ln] if self.counts_LnB is None else [self.load_Ln, self.counts_LnB]
        flat = torch.cat([part.flatten() for part in parts])
        all_reduce(flat)
        sums = [
            piece.view(part.shape)
            for piece, part in zip(flat.split([p.numel() for p in parts]), parts, strict=True)
        ]
        return sums[0], sums[1] if len(sums) > 1 else None

    def _exact(self, layer: int, bias_n: Tensor, gather: Gather | None) -> None:
        scores_Tn = torch.cat([scores for scores, _ in self.margins[layer]])
        cutoff_T = torch.cat([cutoff for _, cutoff in self.margins[layer]])
        if gather is not None:
            scores_Tn, cutoff_T = gather(scores_Tn), gather(cutoff_T)
        if len(cutoff_T):
            bias_n.copy_(bias_exact(scores_Tn, cutoff_T, self.k))


def _plus(total: Tensor | None, part: Tensor) -> Tensor:
    assert part.dtype == torch.int64, f"counts are integers, got {part.dtype}"
    return part.clone() if total is None else total.add_(part)
