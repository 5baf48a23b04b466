"""Shares are kept at every moment, without chance."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3 import UserError
from k3.data.mixture import Mixture


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_counts_follow_the_weights_at_every_draw(weights: list[float]):
    mixture = Mixture({str(i): weight for i, weight in enumerate(weights)})
    total = sum(weights)
    for draws in range(1, 200):
        mixture.draw()
        assert sum(mixture.counts.values()) == draws
        for i, weight in enumerate(weights):
            ahead = mixture.counts[str(i)] - draws * weight / total
            assert -len(weights) / 2 < ahead < 1 + 1e-9


def test_the_schedule_is_fixed():
    mixture = Mixture({"a": 1, "b": 2, "c": 1})
    assert "".join(mixture.draw() for _ in range(12)) == "bacbbacbbacb"


def test_counts_resume():
    whole = Mixture({"a": 0.7, "b": 0.3})
    drawn = [whole.draw() for _ in range(50)]
    resumed = Mixture({"a": 0.7, "b": 0.3})
    resumed.counts = {"a": drawn[:23].count("a"), "b": drawn[:23].count("b")}
    assert [resumed.draw() for _ in range(27)] == drawn[23:]


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), float("inf")])
def test_weights_must_be_positive(weight: float):
    with pytest.raises(UserError, match=f"source 'b': weight .* got {weight}"):
        Mixture({"a": 1.0, "b": weight})


def test_no_sources():
    with pytest.raises(UserError, match="no sources"):
        Mixture({})
