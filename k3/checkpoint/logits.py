"""The logits of a checkpoint for given ids, as a file that other implementations are compared with.

Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3 import UserError
from k3.checkpoint.released import load_released
from k3.checkpoint.tensorfile import entries, write_tensors
from k3.model.transformer import K3
from k3.ops.spans import Spans

ROWS = 512


def inspect_logits(
    folder: Path | str,
    ids: Sequence[int],
    out: Path | str,
    *,
    device: torch.device | str | None = None,
) -> dict[str, Any]:
    """Writes the logits of every position as `logits` fp32 [T, V] to the safetensors file `out`,
    beside `ids` int64 [T], computed in fp32. Returns file, tokens, vocabulary and the last
    position's likeliest id.

    UserError on no ids, or an id outside the vocabulary.
    """
    model = load_released(folder, device=device, dtype=torch.float32)
    _check_ids(ids, model.config.vocab_size)
    out = Path(out)
    logits_TV = _logits(model, torch.tensor(ids, dtype=torch.int64, device=device or "cpu"))
    temp = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(temp, entries({"logits": logits_TV, "ids": torch.tensor(ids)}))
        temp.replace(out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror})") from error
    finally:
        temp.unlink(missing_ok=True)
    return {
        "file": str(out),
        "tokens": len(ids),
        "vocabulary": model.config.vocab_size,
        "likeliest next id": int(logits_TV[-1].argmax()),
    }


@torch.no_grad()
def _logits(model: K3, ids_T: Tensor) -> Tensor:
    h_TD = model(ids_T, Spans.from_lengths([len(ids_T)], ids_T.device)).h_TD
    return torch.cat([model.logits(rows).cpu() for rows in h_TD.split(ROWS)])


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    if not ids:
        raise UserError("logits: at least one id is needed, got none")
    for place, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise UserError(
                f"logits: id {token} at position {place} is outside the vocabulary of {vocab_size}"
            )
