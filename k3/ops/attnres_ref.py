"""Attention Residuals as the report writes them: the specification of `attnres.py`.

Legend: T tokens, D width, S sources.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def mix(sources: Sequence[Tensor], query_D: Tensor, gamma_D: Tensor, eps: float) -> Tensor:
    """h = sum_i softmax_i(w . (gamma * v_i / rms(v_i))) v_i, in fp64.

    sources: S tensors [T, D]; query_D, gamma_D [D] -> [T, D] fp64. No 1/sqrt(D); the values are not
    normalised. Source: Kimi K3 report §2.2, eq. 8-9.
    """
    v_STD = torch.stack([source.double() for source in sources])
    key_STD = v_STD * torch.rsqrt(v_STD.pow(2).mean(-1, keepdim=True) + eps)
    score_ST = key_STD @ (gamma_D.double() * query_D.double())
    return (torch.softmax(score_ST, 0).unsqueeze(-1) * v_STD).sum(0)
