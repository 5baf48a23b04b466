"""What a model tells the outside about each of its parameters, so that no other room parses
names.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ParamFacts:
    """One parameter's role. Published by the model; read by optim, checkpoint and parallel.

    role: embedding, head, matrix, expert, router, norm, vector (A_log, dt_bias), conv, query
    (AttnRes pseudo-query).
    """

    role: str
    decay: bool
    """Whether weight decay applies."""
    heads: int = 0
    """Number of equal head groups along axis 0 that Muon orthogonalises apart; 0 for a whole
    matrix.
    """
    head_rows: tuple[int, ...] = ()
    """Rows of one head, cut into blocks that are orthogonalised apart: (192,) for q_b, (nope, v)
    for kv_b.
    """
    expert_axis: int | None = None
    """The axis that counts experts, for stacked expert weights."""
    logits: int | None = None
    """Index into stats["max_logit"] of the attention layer whose logits this parameter shapes
    (QK-clip).
    """
    clip: tuple[tuple[int, float], ...] = ()
    """Per head, (rows, power): QK-clip multiplies those rows by gamma**power; the rows sum to
    one head's.
    """
    frozen: bool = False
    """Never trained (frozen AttnRes queries): no gradient, no optimizer state, still saved."""
