"""Inference state: a pool and an index into it, written in place by the layers.

Legend: N rows (sequences), P pool slots, H heads, K key and V value width, W taps of the short
convolution, C convolved
channels, B rows per page, M pages per sequence, R cached values per token (MLA: normed latent, then
the raw shared key).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from k3.model.config import K3Config
from k3.ops.spans import Spans

PAGE_ROWS = 64


class State(Protocol):
    """What a layer may ask of the state of N sequences."""

    @property
    def empty(self) -> bool:
        """True while no sequence holds a token."""
        ...

    def kda(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """(S fp32 [P, H, K, V], last pre-convolution inputs [P, W-1, C], slot int32 [N])."""
        ...

    def mla(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """(pages [P, B, R], page table int32 [N, M], tokens held int32 [N], new ones not
        counted).
        """
        ...

    def reserve(self, spans: Spans) -> None:
        """Makes room for the tokens of the next forward pass; called by the model, first."""
        ...

    def record(self, layer: int, inputs: dict[str, Tensor]) -> None:
        """Offers the projected inputs of the new tokens, for replay."""
        ...

    def advance(self, spans: Spans) -> None:
        """Counts the tokens of a finished forward pass; called by the model, once."""
        ...

    def fork(self, rows: Sequence[int]) -> State:
        """An independent copy with the given rows, each as often as it is named."""
        ...

    def slice(self, start: int, stop: int) -> State:
        """Rows start..stop on the same memory."""
        ...


class DenseState:
    """A pool of exactly N rows, for generation, tests and evaluation.

    Grows when a sequence outgrows `capacity`.
    """

    def __init__(
        self,
        config: K3Config,
        rows: int,
        capacity: int = PAGE_ROWS,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        self.config, self.rows = config, rows
        self.lengths = [0] * rows
        self.recorded: dict[int, dict[str, Tensor]] | None = None
        """Set to {} to keep the projected inputs of each forward pass."""
        self._owns = True
        self._kda: dict[int, tuple[Tensor, Tensor]] = {}
        self._pages: dict[int, Tensor] = {}
        self._slot = torch.arange(rows, dtype=torch.int32, device=device)
        pages = -(-capacity // PAGE_ROWS)
        self._table = self._slot[:, None] * pages + torch.arange(
            pages, dtype=torch.int32, device=device
        )
        kinds = config.attn_layers + ("mla",) * config.num_nextn_predict_layers
        for layer, kind in enumerate(kinds):
            if kind == "kda":
                self._kda[layer] = self._empty_kda(device, dtype)
            else:
                width = self._row_width(kind)
                shape = (rows * pages, PAGE_ROWS, width)
                self._pages[layer] = torch.zeros(shape, device=device, dtype=dtype)

    def _empty_kda(
        self, device: torch.device | str | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        c = self.config.kda
        assert c is not None
        matrix = (self.rows, c.num_heads, c.head_dim, c.head_dim)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        window = (self.rows, c.conv_size - 1, 3 * c.width)
        return (
            torch.zeros(matrix, device=device, dtype=wide),
            torch.zeros(window, device=device, dtype=dtype),
        )

    def _row_width(self, kind: str) -> int:
        if kind == "mla":
            assert self.config.mla is not None
            return self.config.mla.row_width
        assert self.config.mha is not None
        return 2 * self.config.mha.width

    @property
    def empty(self) -> bool:
        return not any(self.lengths)

    def kda(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        return (*self._kda[layer], self._slot)

    def mla(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        held = torch.tensor(self.lengths, dtype=torch.int32, device=self._slot.device)
        return self._pages[layer], self._table, held

    def reserve(self, spans: Spans) -> None:
        """Makes room for the tokens of the next forward pass."""
        assert spans.num_spans == self.rows, f"{spans.num_spans} spans for {self.rows} rows"
        sizes = zip(self.lengths, spans.lengths, strict=True)
        needed = max((held + new for held, new in sizes), default=0)
        have = self._table.shape[1]
        if needed <= have * PAGE_ROWS:
            return
        if not self._owns:
            raise ValueError(f"a slice of a state holds {have * PAGE_ROWS} tokens, {needed} needed")
        pages = max(2 * have, -(-needed // PAGE_ROWS))
        for layer, old in self._pages.items():
            grown = old.new_zeros(self.rows, pages, *old.shape[1:])
            grown[:, :have] = old[self._table.long()]
            self._pages[layer] = grown.flatten(0, 1)
        order = torch.arange(pages, dtype=torch.int32, device=self._slot.device)
        self._table = (
            torch.arange(self.rows, dtype=torch.int32, device=order.device)[:, None] * pages
        )
        self._table = self._table + order

    def record(self, layer: int, inputs: dict[str, Tensor]) -> None:
        if self.recorded is not None:
            self.recorded[layer] = inputs

    def advance(self, spans: Spans) -> None:
        self.lengths = [held + new for held, new in zip(self.lengths, spans.lengths, strict=True)]

    def fork(self, rows: Sequence[int]) -> DenseState:
        index = torch.tensor(list(rows), dtype=torch.int64, device=self._slot.device)
        child = self._view(len(index), [self.lengths[row] for row in rows])
        pages = self._table.shape[1]
        child._kda = {
            layer: (S[self._slot[index].long()].clone(), window[self._slot[index].long()].clone())
            for layer, (S, window) in self._kda.items()
        }
        child._pages = {
            layer: old[self._table[index].long()].flatten(0, 1)
            for layer, old in self._pages.items()
        }
        child._slot = torch.arange(len(index), dtype=torch.int32, device=self._slot.device)
        order = torch.arange(pages, dtype=torch.int32, device=self._slot.device)
        child._table = child._slot[:, None] * pages + order
        return child

    def slice(self, start: int, stop: int) -> DenseState:
        child = self._view(stop - start, self.lengths[start:stop])
        child._owns = False
        child._kda, child._pages = self._kda, self._pages
        child._slot, child._table = self._slot[start:stop], self._table[start:stop]
        return child

    def _view(self, rows: int, lengths: list[int]) -> DenseState:
        child = object.__new__(DenseState)
        child.config, child.rows, child.lengths, child.recorded = self.config, rows, lengths, None
        child._owns = True
        return child
