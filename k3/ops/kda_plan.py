"""How packed spans are cut into the chunks of KDA: an index of rows, and blocks of steps.

Chunks are ordered by their place in their span, longest span first, so one step of the hand-over
of states is one slice of chunks, and the spans still alive are the first ones.

Legend: T tokens, N spans, H heads, M chunks, B = M·H, C rows per chunk, R flat rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Block:
    """Consecutive steps of the hand-over. Positions count chunk-heads."""

    start: int
    stop: int
    steps: tuple[tuple[int, int], ...]
    """Per step, its slice of the block."""
    following: tuple[int, ...]
    """Per step, how many of its chunk-heads have a next step."""
    empty_R: Tensor | None
    """Rows of the block (over B·C) that hold no token; None when all do."""


@dataclass(frozen=True, eq=False)
class Plan:
    """How spans are cut into chunks."""

    size: int
    heads: int
    blocks: tuple[Block, ...]
    token_MC: Tensor
    """Token of each chunk row, int64; 0 for the empty rows before a short chunk."""
    back_R: Tensor
    """[T·H] chunk row (over B·C) of each token and head."""
    order_R: Tensor
    """[N·H] the state of each span and head, spans by falling length."""
    gathers: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def gather(self, token_step: int, head_step: int) -> Tensor:
        """[B·C] the row of each chunk row in an input with these steps between rows."""
        key = (token_step, head_step)
        if key not in self.gathers:
            head_H1 = torch.arange(self.heads, device=self.token_MC.device)[:, None]
            rows_MHC = self.token_MC[:, None] * token_step + head_H1 * head_step
            self.gathers[key] = rows_MHC.flatten().to(torch.int32)
        return self.gathers[key]


@lru_cache(maxsize=16)
def make_plan(
    lengths: tuple[int, ...], heads: int, size: int, limit: int, device: torch.device
) -> Plan:
    """Cuts spans into chunks of `size` rows, and steps into blocks of about `limit` chunk-heads."""
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    starts: list[int] = []
    counts: list[int] = []
    active: list[int] = []
    alive = len(order)
    for step in range(-(-max(lengths, default=0) // size)):
        while lengths[order[alive - 1]] <= step * size:
            alive -= 1
        active.append(alive)
        starts += [offsets[n] + step * size for n in order[:alive]]
        counts += [min(size, lengths[n] - step * size) for n in order[:alive]]
    start_M1 = torch.tensor(starts, dtype=torch.int64)[:, None]
    # A short chunk is filled from its end, so that its last row is a token and leaves undecayed.
    skip_M1 = size - torch.tensor(counts, dtype=torch.int64)[:, None]
    inside_MC = torch.arange(size) >= skip_M1
    token_MC = torch.where(inside_MC, start_M1 + torch.arange(size) - skip_M1, 0)
    row_MHC = torch.arange(len(starts) * heads * size).view(-1, heads, size)
    back_TH = torch.empty(offsets[-1], heads, dtype=torch.int64)
    back_TH[token_MC[inside_MC]] = row_MHC.transpose(1, 2)[inside_MC]
    order_NH = torch.tensor(order, dtype=torch.int64)[:, None] * heads + torch.arange(heads)
    return Plan(
        size,
        heads,
        _blocks(active, heads, limit, inside_MC, device),
        token_MC.to(device),
        back_TH.flatten().to(device, torch.int32),
        order_NH.flatten().to(device),
    )


def _blocks(
    active: list[int], heads: int, limit: int, inside_MC: Tensor, device: torch.device
) -> tuple[Block, ...]:
    blocks: list[Block] = []
    steps: list[tuple[int, int]] = []
    following: list[int] = []
    start = stop = 0
    for count, after in zip(active, [*active[1:], 0], strict=True):
        steps.append((stop - start, stop - start + count * heads))
        following.append(after * heads)
        stop += count * heads
        if after == 0 or stop + after * heads - start > limit:
            inside = inside_MC[start // heads : stop // heads, None].expand(-1, heads, -1)
            empty_R = (~inside).flatten().nonzero().flatten()
            blocks.append(
                Block(
                    start,
                    stop,
                    tuple(steps),
                    tuple(following),
                    empty_R.to(device) if len(empty_R) else None,
                )
            )
            start, steps, following = stop, [], []
    return tuple(blocks)


def cut(x_THx: Tensor, plan: Plan, block: Block, dtype: torch.dtype) -> Tensor:
    """[T, H, x] -> the block's [B, C, x], zero in empty rows."""
    width = x_THx.shape[2]
    step_T, step_H, step_x = x_THx.stride()
    if step_x != 1 or step_T % width or step_H % width or x_THx.shape[0] == 1:
        x_THx = x_THx.contiguous()
        step_T, step_H = plan.heads * width, width
    # Every head of every token is one row of the storage, also in a slice of a wider tensor.
    step_T, step_H = step_T // width, step_H // width
    count = (x_THx.shape[0] - 1) * step_T + (plan.heads - 1) * step_H + 1
    rows_Rx = x_THx.as_strided((count, width), (width, 1))
    index = plan.gather(step_T, step_H)[block.start * plan.size : block.stop * plan.size]
    x_Rx = rows_Rx.index_select(0, index).to(dtype)
    if block.empty_R is not None:
        x_Rx.index_fill_(0, block.empty_R, 0.0)
    return x_Rx.view(-1, plan.size, width)
