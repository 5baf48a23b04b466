"""Data parallelism: every rank holds the model, ranks see different tokens, gradients are summed.

Losses are divided by the number of tokens of the whole step over all ranks, before the backward
pass. Then the sum over ranks *is* the gradient of one rank that saw everything, whatever the ranks'
shares, and nothing is averaged twice.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from k3.parallel.mesh import Mesh

BUCKET = 1 << 24
"""Elements exchanged at once: bounds the memory of the flat copies."""


@torch.no_grad()
def sum_gradients(params: Iterable[Tensor], mesh: Mesh) -> None:
    """Replaces every gradient by its sum over ranks, in a few flat all-reduces.

    A parameter with a gradient on some ranks only counts as zero on the others; one without any
    keeps None.
    """
    if mesh.world == 1:
        return
    trained = [param for param in params if param.requires_grad]
    for param, used in zip(trained, _used_anywhere(trained, mesh), strict=True):
        if used and param.grad is None:
            param.grad = torch.zeros_like(param)
    for bucket in _buckets([param.grad for param in trained if param.grad is not None]):
        flat = torch.cat([grad.flatten() for grad in bucket])
        mesh.sum_(flat)
        pieces = flat.split([grad.numel() for grad in bucket])
        torch._foreach_copy_(bucket, [p.view_as(g) for p, g in zip(pieces, bucket, strict=True)])


def _used_anywhere(params: list[Tensor], mesh: Mesh) -> list[bool]:
    flags = torch.tensor([int(param.grad is not None) for param in params], device=mesh.device)
    return [bool(flag) for flag in mesh.max_(flags).tolist()]


def _buckets(grads: list[Tensor]) -> Iterable[list[Tensor]]:
    """Runs of gradients of one dtype, up to `BUCKET` elements (a larger one travels alone)."""
    bucket: list[Tensor] = []
    size = 0
    for grad in sorted(grads, key=lambda g: str(g.dtype)):
        full = size + grad.numel() > BUCKET
        if bucket and (full or grad.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(grad)
        size += grad.numel()
    if bucket:
        yield bucket


@torch.no_grad()
def same_everywhere(tensors: Iterable[Tensor], mesh: Mesh) -> bool:
    """Whether all ranks hold bit-identical tensors: a checksum of their bits, compared in one
    exchange.
    """
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    total = torch.zeros((), dtype=torch.int64, device=mesh.device)
    for tensor in tensors:
        words = tensor.detach().flatten().view(integers[tensor.element_size()])
        total = total * 31 + words.sum(dtype=torch.int64)
    extremes = mesh.max_(torch.stack([total, -total]))
    return bool(extremes[0] == -extremes[1])
