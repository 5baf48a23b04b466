"""Where documents begin and end on the flat token axis.

Legend: T tokens, N spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Spans:
    """Cumulative sequence lengths of the documents packed on one token axis.

    `cu_seqlens` is int32 [N+1] on the device, `lengths` the same on the host (no synchronisation
    needed to loop),
    `padding` the number of trailing tokens that belong to nobody; if not zero they are the last
    span.
    Empty spans are allowed. Build with `from_lengths` or `from_cu_seqlens`.
    """

    cu_seqlens: Tensor
    lengths: tuple[int, ...]
    padding: int = 0

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int], device: torch.device | str | None = None, padding: int = 0
    ) -> Spans:
        """Spans of the given lengths, followed by `padding` tokens.

        ValueError on a negative length.
        """
        if padding < 0 or any(length < 0 for length in lengths):
            raise ValueError(f"span lengths must not be negative, got {list(lengths)} + {padding}")
        whole = tuple(int(length) for length in lengths) + ((padding,) if padding else ())
        cu_seqlens = torch.tensor([0, *whole], dtype=torch.int64).cumsum(0).to(torch.int32)
        return cls(cu_seqlens.to(device) if device is not None else cu_seqlens, whole, padding)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, num_tokens: int) -> Spans:
        """Checks that offsets start at 0, never fall and end at `num_tokens`; ValueError names
        the offsets.
        """
        offsets = cu_seqlens.tolist()
        rising = all(a <= b for a, b in zip(offsets, offsets[1:], strict=False))
        if not offsets or offsets[0] != 0 or not rising or offsets[-1] != num_tokens:
            raise ValueError(
                f"cu_seqlens must rise from 0 to the {num_tokens} tokens given, got {offsets[:8]}"
            )
        lengths = tuple(b - a for a, b in zip(offsets, offsets[1:], strict=False))
        return cls(cu_seqlens.to(torch.int32), lengths)

    @property
    def device(self) -> torch.device:
        return self.cu_seqlens.device

    @cached_property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def num_spans(self) -> int:
        return len(self.lengths)

    @cached_property
    def max_len(self) -> int:
        return max(self.lengths, default=0)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The host's copy of `cu_seqlens`."""
        offsets = [0]
        for length in self.lengths:
            offsets.append(offsets[-1] + length)
        return tuple(offsets)

    def segments(self) -> Tensor:
        """int64 [T]: the span of each token."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64, device=self.device)
        index = torch.arange(self.num_spans, device=self.device)
        return torch.repeat_interleave(index, lengths, output_size=self.num_tokens)

    def positions(self) -> Tensor:
        """int64 [T]: the place of each token in its span, from 0."""
        starts = self.cu_seqlens[:-1].to(torch.int64)
        return torch.arange(self.num_tokens, device=self.device) - starts[self.segments()]

    def valid(self) -> Tensor:
        """bool [T]: False on padding."""
        mask = torch.ones(self.num_tokens, dtype=torch.bool, device=self.device)
        if self.padding:
            mask[-self.padding :] = False
        return mask

    def to(self, device: torch.device | str) -> Spans:
        return Spans(self.cu_seqlens.to(device), self.lengths, self.padding)
