"""Attention Residuals: the depth of the network as a sequence that each sublayer attends over
(report §2.2, eq. 8-10).

A `Depth` holds the finished block rows and the running sum of the current block. Sublayers read a
mixture of them and add
their output to the sum; the mixture itself is never added to anything. A plain residual never
closes a block, so the
running sum is the residual stream and reading it is the identity.

Legend: T tokens, D hidden, Q queries of one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from k3.model.config import K3Config
from k3.model.layers import Linear, RMSNorm
from k3.ops.attnres import Partial, attend_blocks, merge, mix


class DepthQuery(NamedTuple):
    """One sublayer's pseudo-query and the weight of its key norm."""

    query_D: Tensor
    gamma_D: Tensor
    eps: float


class Depth(NamedTuple):
    """Finished block rows, each [T, D], and the sum of sublayer outputs since (None right after
    a block was closed).
    """

    blocks: tuple[Tensor, ...]
    prefix: Tensor | None
    partial: Partial | None = None
    """Two-phase evaluation: the queries of this block already attended over `blocks`."""
    first_query: int = 0
    """Sublayer index of the partial's first query."""

    def close(self, queries: Sequence[DepthQuery] = (), first_query: int = 0) -> Depth:
        """Ends the block: its un-mixed sum becomes a row.

        With queries, phase 1 of the two-phase schedule runs.
        """
        assert self.prefix is not None, "a block needs at least one sublayer"
        blocks = (*self.blocks, self.prefix)
        if not queries:
            return Depth(blocks, None)
        query_QD = torch.stack([q.query_D for q in queries])
        gamma_QD = torch.stack([q.gamma_D for q in queries])
        partial = attend_blocks(blocks, query_QD, gamma_QD, queries[0].eps)
        return Depth(blocks, None, partial, first_query)

    def read(self, query: DepthQuery | None, sublayer: int) -> Tensor:
        """The mixture [T, D] that a sublayer takes as its input."""
        if query is None or not self.blocks:
            assert self.prefix is not None
            return self.prefix
        if self.partial is not None:
            index = sublayer - self.first_query
            return merge(self.partial, index, self.prefix, *query)
        sources = self.blocks if self.prefix is None else (*self.blocks, self.prefix)
        return sources[0] if len(sources) == 1 else mix(sources, *query)

    def add(self, x_TD: Tensor) -> Depth:
        return self._replace(prefix=x_TD if self.prefix is None else self.prefix + x_TD)


class DepthMixing(nn.Module):
    """Gives a module the released pair `<name>_norm`, `<name>_proj` and reads it as a
    `DepthQuery`.
    """

    def __init__(self, config: K3Config):
        super().__init__()
        self.mixes = config.attnres.kind != "none"
        self.frozen = config.attnres.query != "learned"

    def add_query(self, name: str, config: K3Config, **factory: Any) -> None:
        if not self.mixes:
            return
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **factory)
        proj = Linear(config.hidden_size, 1, **factory)
        for module in (norm, proj):
            module.weight.requires_grad_(not self.frozen)
        setattr(self, f"{name}_norm", norm)
        setattr(self, f"{name}_proj", proj)

    def query(self, name: str) -> DepthQuery | None:
        if not self.mixes:
            return None
        norm, proj = getattr(self, f"{name}_norm"), getattr(self, f"{name}_proj")
        return DepthQuery(proj.weight[0], norm.weight, norm.eps)
