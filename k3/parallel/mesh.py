"""The ranks of a run: one process alone, or as many as torchrun started.

Everything else in the project asks a `Mesh` for sums, never torch.distributed, so that one rank and
many run the same code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from k3 import UserError

ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Mesh:
    """This process's place among the ranks. All methods are collective: every rank calls them in
    the same order.
    """

    rank: int
    world: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Rank 0: the one that prints and writes files."""
        return self.rank == 0

    def sum_(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.world > 1:
            dist.all_reduce(x, dist.ReduceOp.SUM)
        return x

    def max_(self, x: Tensor) -> Tensor:
        """Maximum over ranks, in place."""
        if self.world > 1:
            dist.all_reduce(x, dist.ReduceOp.MAX)
        return x

    def gather_rows(self, x: Tensor) -> Tensor:
        """The rows (axis 0) of all ranks, in rank order; ranks may hold different numbers."""
        if self.world == 1:
            return x
        counts = torch.zeros(self.world, dtype=torch.int64, device=x.device)
        counts[self.rank] = len(x)
        lengths = [int(count) for count in self.sum_(counts)]
        padded = x.new_zeros(max(lengths), *x.shape[1:])
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded)
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    def largest(self, value: int) -> int:
        """The largest value of any rank: how a wish of one rank (to save, to stop) becomes
        everyone's.
        """
        if self.world == 1:
            return value
        return int(self.max_(torch.tensor([value], device=self.device)))

    def barrier(self) -> None:
        """Waits for the slowest rank."""
        self.largest(0)


def pick_device(name: str = "auto", local_rank: int = 0) -> torch.device:
    """`auto` is this rank's CUDA device where there is one, else the CPU. UserError names what is
    not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device: auto, cpu or cuda, got {name!r}") from None
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise UserError("device: cuda was asked for, but torch sees no CUDA device")
    index = local_rank if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise UserError(
            f"device: cuda:{index} was asked for, but there are {torch.cuda.device_count()} devices"
        )
    return torch.device("cuda", index)


@contextmanager
def open_mesh(device: str = "auto", timeout_s: float = 600.0) -> Iterator[Mesh]:
    """The mesh of this process: from torchrun's environment, else one rank. Closed on leaving.

    UserError in one line where the environment is incomplete or the other ranks can't be reached.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Mesh(0, 1, _activate(pick_device(device)))
        return
    if absent := [name for name in ENVIRONMENT if name not in os.environ]:
        raise UserError(f"WORLD_SIZE is set but {absent[0]} is not: start ranks with torchrun")
    rank, world, local = (int(os.environ[name]) for name in ENVIRONMENT[:3])
    here = _activate(pick_device(device, local))
    backend = "nccl" if here.type == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
            device_id=here if backend == "nccl" else None,
        )
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UserError(
            f"rank {rank} of {world} could not join {backend} at {address}: {_first_line(error)}"
        ) from error
    try:
        yield Mesh(rank, world, here)
    finally:
        dist.destroy_process_group()


def _activate(device: torch.device) -> torch.device:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
