"""The learning-rate schedules at their corners."""

import pytest

from k3 import UserError
from k3.optim.schedule import ScheduleConfig, lr_at


def curve(steps, **config):
    return [lr_at(step, steps, ScheduleConfig(**config)) for step in range(steps)]


def test_cosine_rises_for_one_percent_and_ends_at_the_minimum():
    lrs = curve(1000)
    assert lrs[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert max(lrs) == lrs[9] == 1.0
    assert all(a > b for a, b in zip(lrs[9:], lrs[10:], strict=False))
    assert lrs[-1] == pytest.approx(0.1)
    # Half way down, half way between: a straight line would agree, a quarter of the way only the
    # cosine does.
    assert lrs[9 + 495] == pytest.approx(0.55, abs=1e-3)
    assert lrs[9 + 247] == pytest.approx(0.1 + 0.9 * 0.8536, abs=2e-3)


def test_wsd_is_flat_then_falls_evenly():
    lrs = curve(100, kind="wsd", warmup=0.05, decay=0.2, min_ratio=0.0)
    assert lrs[5:80] == [1.0] * 75
    assert lrs[80:] == pytest.approx([1 - (i + 1) / 20 for i in range(20)])


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_very_short_runs(steps, kind):
    assert all(0.0 < lr <= 1.0 for lr in curve(steps, kind=kind))


def test_bad_values_name_themselves():
    with pytest.raises(UserError, match="schedule.kind.*'linear'"):
        ScheduleConfig(kind="linear")
    with pytest.raises(UserError, match=r"schedule.min_ratio.*1\.5"):
        ScheduleConfig(min_ratio=1.5)
    with pytest.raises(UserError, match=r"0\.6 \+ 0\.5"):
        ScheduleConfig(kind="wsd", warmup=0.6, decay=0.5)
