"""Which source the next micro-batch comes from: the one furthest behind its share, so no chance is
involved."""

from __future__ import annotations

import math
from collections.abc import Mapping

from k3 import UserError


class Mixture:
    """Draws source names; no source is ever a whole micro-batch ahead of its share.

    `weights` are by name and need not sum to one. UserError names a weight that is not positive and
    finite.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        if not weights:
            raise UserError("the mixture has no sources")
        for name, weight in weights.items():
            if not (math.isfinite(weight) and weight > 0):
                raise UserError(
                    f"source {name!r}: weight must be positive and finite, got {weight}"
                )
        self.weights = dict(weights)
        self.counts = dict.fromkeys(weights, 0)
        self._total = math.fsum(weights.values())

    def draw(self) -> str:
        """The source of the next micro-batch; ties go to the one named first."""
        draws = sum(self.counts.values()) + 1
        name = max(self.counts, key=lambda name: self._deficit(name, draws))
        self.counts[name] += 1
        return name

    def _deficit(self, name: str, draws: int) -> float:
        return self.weights[name] * draws / self._total - self.counts[name]
