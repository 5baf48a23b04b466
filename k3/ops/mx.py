"""Microscaling number formats: MXFP4 (weights) and MXFP8 (activations), groups of 32 with an E8M0
scale.

The scale's exponent is floor(log2(amax)), plus 1 where amax's mantissa is at least 1.75 (it would
round past the largest element), minus 2 for E2M1 or 8 for E4M3; elements round to the nearest even
and saturate. Bytes equal compressed-tensors'. Source: OCP Microscaling Formats v1.0; Kimi K3 report
§4.1.4.

Legend: x any leading axes, I input columns (a multiple of 32), G = I / 32 groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_SHIFT, E2M1_MAX = 2, 6.0
E4M3_SHIFT, E4M3_MAX = 8, 448.0


def pack_mxfp4(w_xI: Tensor) -> tuple[Tensor, Tensor]:
    """(packed uint8 [..., I/2], scale uint8 [..., I/32]).

    The low nibble holds the even column; bit 3 of a nibble is the sign (kept where a negative value
    rounds to zero). The scale byte is the exponent + 127; a group of zeros has byte 0.
    Raises ValueError if I is not a multiple of 32 or a weight is not finite.
    """
    if not bool(torch.isfinite(w_xI).all()):
        raise ValueError("cannot pack weights that are not finite as MXFP4")
    w_xG32 = _grouped(w_xI)
    scale_xG1 = _scale_bytes(w_xG32, E2M1_SHIFT)
    q_xI = _round_e2m1(w_xG32 / _scale_value(scale_xG1)).flatten(-2)
    grid = torch.tensor(E2M1, device=w_xI.device)
    code_xI = torch.bucketize(q_xI.abs(), grid).to(torch.uint8)
    code_xI |= (q_xI.signbit() & (w_xI < 0)).to(torch.uint8) << 3
    packed = code_xI[..., 0::2] | (code_xI[..., 1::2] << 4)
    return packed, scale_xG1.squeeze(-1).to(torch.uint8)


def unpack_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[..., I] in `dtype` (exact in bf16 within its exponent range).

    packed uint8 [..., I/2], scale uint8 [..., I/32]. Raises ValueError if they do not fit.
    """
    if packed.shape[:-1] != scale.shape[:-1] or packed.shape[-1] * 2 != scale.shape[-1] * GROUP:
        raise ValueError(f"packed {tuple(packed.shape)} and scale {tuple(scale.shape)} do not fit")
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=packed.device)
    code_xI = torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)
    value_xG32 = table[code_xI.to(torch.int64)].unflatten(-1, (-1, GROUP))
    return (value_xG32 * _scale_value(scale.to(torch.int32).unsqueeze(-1))).flatten(-2).to(dtype)


def quantize_mxfp4(w_xI: Tensor) -> Tensor:
    """`unpack(pack(w))` without the bytes, in w's dtype. Not a number stays not a number. No
    gradient of its own."""
    w_xG32 = _grouped(w_xI.detach())
    scale_xG1 = _scale_value(_scale_bytes(w_xG32, E2M1_SHIFT))
    return (_round_e2m1(w_xG32 / scale_xG1) * scale_xG1).flatten(-2).to(w_xI.dtype)


def quantize_mxfp8(x_xI: Tensor) -> Tensor:
    """Each group of 32 through E4M3 and back, in x's dtype. Not a number stays not a number. No
    gradient of its own."""
    x_xG32 = _grouped(x_xI.detach())
    scale_xG1 = _scale_value(_scale_bytes(x_xG32, E4M3_SHIFT))
    q_xG32 = (x_xG32 / scale_xG1).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return (q_xG32.float() * scale_xG1).flatten(-2).to(x_xI.dtype)


def _grouped(w_xI: Tensor) -> Tensor:
    if w_xI.shape[-1] % GROUP:
        raise ValueError(f"{w_xI.shape[-1]} columns are not a multiple of {GROUP}")
    return w_xI.float().unflatten(-1, (-1, GROUP))


def _scale_bytes(w_xG32: Tensor, shift: int) -> Tensor:
    """int32 [..., G, 1]: biased exponents. Adding a quarter to the mantissa carries into the
    exponent from 1.75 on."""
    amax = w_xG32.abs().amax(-1, keepdim=True)
    exponent = (amax.view(torch.int32) + (1 << 21)) >> 23
    return (exponent - shift).clamp_(0, 254)


def _scale_value(byte: Tensor) -> Tensor:
    """2 ** (byte - 127) as fp32, exactly; byte 0 is the subnormal 2 ** -127."""
    return torch.where(byte > 0, byte << 23, 1 << 22).to(torch.int32).view(torch.float32)


def _round_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 value, ties to the even mantissa, saturating at 6."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (torch.round(x / step) * step).clamp_(-E2M1_MAX, E2M1_MAX)
