"""Intervals and what widens them."""

from __future__ import annotations

import numpy as np
import pytest

from megabatch.plan.interval import Reach, combine, interval, reach_deviation, reach_warnings


def test_holds_four_of_five() -> None:
    draws = 3.0 * np.exp(0.2 * np.random.default_rng(1).standard_normal(20_000))
    here = interval(3.0, 0.2)
    assert np.mean([here.holds(value) for value in draws]) == pytest.approx(0.8, abs=0.01)
    assert here.times(2).high == pytest.approx(2 * here.high)


@pytest.mark.parametrize(
    ("reach", "words"),
    [
        (Reach(workers=5), "32 times the workers"),
        (Reach(batch=1), "local batch 2 times outside"),
        (Reach(evidence="same stack"), "another machine"),
        (Reach(evidence="other stack"), "another software stack"),
        (Reach(evidence="other framework"), "another framework"),
        (Reach(evidence="other system"), "other organisations"),
        (Reach(first_time_across_nodes=True), "one node only"),
        (Reach(mixed_measurement=True), "evaluation"),
    ],
)
def test_distance_widens_and_is_told(reach: Reach, words: str) -> None:
    assert reach_deviation(reach) > reach_deviation(Reach())
    assert words in reach_warnings(reach)[0]
    assert reach_warnings(Reach(workers=2)) == []


def test_deviations_add_in_squares() -> None:
    assert combine(3.0, 4.0) == pytest.approx(5.0)
