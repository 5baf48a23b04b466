"""Recomputation: a layer keeps its input and forgets what is inside, which the backward pass makes
again.

The experts a token visits are kept, not made again: two nearly equal scores may change places
between two runs of a kernel, and a gradient computed along another route than the loss would be
wrong without a sign of it. Statistics come out of the first run only, so no token is counted twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from k3 import UserError

POLICIES = ("none", "layer")
KEPT = {torch.ops.aten.topk.default, torch.ops.aten.sort.default, torch.ops.aten.sort.stable}
"""Operations whose results are kept: the ones that choose."""


def apply_remat(model: nn.Module, policy: str) -> None:
    """Wraps the forward of every decoder and MTP layer of `model`; losses and gradients do not
    change.

    policy: none, or layer (memory of one layer's inside instead of all layers', a third more
    arithmetic). UserError on another name.
    """
    if policy not in POLICIES:
        raise UserError(f"remat: one of {POLICIES}, got {policy!r}")
    if policy == "none":
        return
    for name in ("layers", "mtp"):
        for layer in getattr(model, name, ()):
            layer.forward = _recomputed(layer.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args)
        # No layer draws random numbers, so there is no generator state to put back.
        return checkpoint(
            forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts
        )

    return call


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
