"""One packed micro-batch.

Legend: T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from k3.ops.spans import Spans

IGNORE = -100
"""The target of a token that predicts nothing."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Tokens of several documents on one axis; a span never crosses a document's edge.

    Targets follow the document, also across a span's edge, so a document cut at the context length
    loses no prediction: only its last token has none.
    """

    ids_T: Tensor
    """int64 [T]."""
    targets_T: Tensor
    """int64 [T]: the document's next token, -100 at its last."""
    next_ids_T: Tensor
    """int64 [T]: the next token as an input for multi-token prediction; the pad id where there is
    none."""
    targets2_T: Tensor
    """int64 [T]: the token after the next, -100 at the document's last two."""
    spans: Spans

    @property
    def num_tokens(self) -> int:
        return self.ids_T.shape[0]

    def to(self, device: torch.device | str) -> Batch:
        return Batch(
            self.ids_T.to(device),
            self.targets_T.to(device),
            self.next_ids_T.to(device),
            self.targets2_T.to(device),
            self.spans.to(device),
        )
