"""Products whose result keeps fp32 whatever the operands are: shared by attention, experts and the
loss.

Legend: B batch, M rows, K inner, N columns.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type to accumulate in: fp64 stays, everything else is fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Autocast would silently narrow the products inside an op that promises fp32 arithmetic."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def product(a_BMK: Tensor, b_BKN: Tensor) -> Tensor:
    """a @ b (both 2-D or both 3-D) accumulated and returned in fp32 (fp64 for fp64 operands).

    On CUDA narrow operands feed the tensor cores and only the result is wide; elsewhere they are
    widened first, because a CPU product of bf16 operands would round its result to bf16.
    """
    dtype = wide(torch.promote_types(a_BMK.dtype, b_BKN.dtype))
    if a_BMK.is_cuda and a_BMK.dtype == b_BKN.dtype and a_BMK.dtype != dtype:
        matmul: Any = torch.mm if a_BMK.dim() == 2 else torch.bmm
        return matmul(a_BMK, b_BKN, out_dtype=dtype)
    return torch.matmul(a_BMK.to(dtype), b_BKN.to(dtype))


def accumulate(out_BMN: Tensor, a_BMK: Tensor, b_BKN: Tensor) -> None:
    """out += a @ b in place, without a temporary where all three have one dtype."""
    if not a_BMK.dtype == b_BKN.dtype == out_BMN.dtype:
        out_BMN += product(a_BMK, b_BKN)
    elif out_BMN.dim() == 2:
        out_BMN.addmm_(a_BMK, b_BKN)
    else:
        out_BMN.baddbmm_(a_BMK, b_BKN)
