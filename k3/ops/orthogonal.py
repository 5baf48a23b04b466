"""Newton-Schulz orthogonalisation, the heart of Muon.

Legend: A, B the two sides of each matrix; everything before them is a batch (heads, experts).
"""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the odd quintic a x + b x^3 + c x^5, which drives singular values into about 0.7..1.2.
Source: "Muon is scalable for LLM training" (arXiv 2502.16982), §2."""


def orthogonalize(m_xAB: Tensor, steps: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """Each [A, B] matrix with its singular values moved close to 1; same shape and dtype.

    m [..., A, B], each matrix on its own scale (Frobenius norm 1 first). `dtype` is that of the
    iteration: by default fp64 for fp64, bf16 on CUDA, else fp32. A zero matrix stays zero.
    Raises ValueError for fewer than two axes. Source: Kimi K3 report §2.5.
    """
    if m_xAB.dim() < 2:
        raise ValueError(f"orthogonalize needs matrices, got shape {tuple(m_xAB.shape)}")
    x = _unit(m_xAB, dtype or _default_dtype(m_xAB))
    tall = x.shape[-2] > x.shape[-1]
    x = (x.mT if tall else x).reshape(-1, *sorted(x.shape[-2:]))
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.mT if tall else x
    return x.reshape(m_xAB.shape).to(m_xAB.dtype)


def _default_dtype(m: Tensor) -> torch.dtype:
    if m.dtype == torch.float64:
        return torch.float64
    return torch.bfloat16 if m.is_cuda else torch.float32


def _unit(m_xAB: Tensor, dtype: torch.dtype) -> Tensor:
    """Each matrix over its Frobenius norm.

    Divided by its largest entry first: squares of entries below 1e-19 would vanish in fp32, and a
    head with a tiny gradient deserves the same update as its neighbours.
    """
    m = m_xAB if m_xAB.dtype == torch.float64 else m_xAB.float()
    tiny = torch.finfo(m.dtype).tiny
    m = m / m.abs().amax((-2, -1), keepdim=True).clamp(min=tiny)
    norm = torch.linalg.vector_norm(m, dim=(-2, -1), keepdim=True)
    return (m / norm.clamp(min=tiny)).to(dtype)
