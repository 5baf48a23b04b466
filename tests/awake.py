"""A fresh model's residual writers are zero, so its branches say nothing; here they speak."""

from __future__ import annotations

import torch

from k3.model.transformer import K3


@torch.no_grad()
def awake(model: K3) -> K3:
    """Draws every matrix that starts at zero from N(0, 1/fan-in), as the others are."""
    for name, facts in model.param_facts().items():
        weight = model.get_parameter(name)
        if facts.role in ("matrix", "expert") and not weight.any():
            weight.copy_(torch.randn(weight.shape) * weight.shape[-1] ** -0.5)
    return model
