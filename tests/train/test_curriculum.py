"""Which step trains at which context."""

import pytest

from k3.train.config import Stage
from k3.train.curriculum import stage_at, stage_ends

THREE = (Stage(256, 0.6), Stage(1024, 0.25), Stage(4096, 0.15))


def test_shares_become_steps():
    assert stage_ends(THREE, 1000) == [600, 850, 1000]
    assert [stage_at(THREE, 1000, step) for step in (1, 600, 601, 850, 851, 1000)] == [
        0, 0, 1, 1, 2, 2,
    ]  # fmt: skip


@pytest.mark.parametrize("steps", range(1, 30))
def test_every_step_has_one_stage_and_stages_follow_each_other(steps):
    stages = [stage_at(THREE, steps, step) for step in range(1, steps + 1)]
    assert stages == sorted(stages)
    assert stage_ends(THREE, steps)[-1] == steps


def test_shares_that_do_not_add_up_in_binary_still_cover_the_last_step():
    thirds = tuple(Stage(8, 0.1) for _ in range(10))
    assert stage_at(thirds, 10, 10) == 9
