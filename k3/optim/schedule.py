"""The learning rate over a run: linear warm-up, then cosine (K3) or warm-up, stable, decay.

Source: Kimi K3 report §3.2-3.3: cosine with 1% linear warm-up; WSD lost where each was tuned for
itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from k3 import UserError


@dataclass(frozen=True)
class ScheduleConfig:
    kind: str = "cosine"
    """cosine, or wsd: constant, then a linear fall."""
    warmup: float = 0.01
    """Share of the steps that rise linearly from zero."""
    min_ratio: float = 0.1
    """The last step's learning rate over the peak."""
    decay: float = 0.15
    """Share of the steps that fall (wsd only)."""

    def __post_init__(self) -> None:
        if self.kind not in ("cosine", "wsd"):
            raise UserError(f"schedule.kind: cosine or wsd, got {self.kind!r}")
        for name in ("warmup", "min_ratio", "decay"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise UserError(f"schedule.{name} must lie in [0, 1], got {value}")
        if self.kind == "wsd" and self.warmup + self.decay > 1.0:
            raise UserError(
                f"schedule.warmup + schedule.decay must not exceed 1, "
                f"got {self.warmup} + {self.decay}"
            )


def lr_at(step: int, total_steps: int, config: ScheduleConfig) -> float:
    """Multiplier of the peak learning rate for step `step` of 0..total_steps-1; the last step's is
    `min_ratio`.
    """
    warm = math.ceil(config.warmup * total_steps)
    if step < warm:
        return (step + 1) / warm
    falls_from = warm
    if config.kind == "wsd":
        falls_from = max(warm, total_steps - math.ceil(config.decay * total_steps))
    if step < falls_from:
        return 1.0
    # The step before the fall has the peak, so that the fall itself is even.
    done = min(1.0, (step - falls_from + 1) / (total_steps - falls_from))
    shape = 0.5 * (1.0 + math.cos(math.pi * done)) if config.kind == "cosine" else 1.0 - done
    return config.min_ratio + (1.0 - config.min_ratio) * shape
