"""Which context length a step trains at."""

from __future__ import annotations

from collections.abc import Sequence

from k3.train.config import RunConfig, Stage


def stage_ends(stages: Sequence[Stage], steps: int) -> list[int]:
    """The last step (counted from 1) of each stage; a stage too small for one step ends where it
    begins.
    """
    ends, share = [], 0.0
    for stage in stages:
        share += stage.share
        ends.append(round(share * steps))
    ends[-1] = steps
    return ends


def stage_at(stages: Sequence[Stage], steps: int, step: int) -> int:
    """Index of the stage that step `step` of 1..steps belongs to."""
    return next(index for index, end in enumerate(stage_ends(stages, steps)) if step <= end)


def tokens_until(run: RunConfig, step: int) -> int:
    """Tokens that steps 1..`step` of the run read."""
    tokens, begin = 0, 0
    for stage, end in zip(run.stages, stage_ends(run.stages, run.steps), strict=True):
        tokens += max(0, min(step, end) - begin) * run.step_tokens(stage.context)
        begin = max(begin, end)
    return tokens
