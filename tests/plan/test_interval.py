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
        (Reach(batch=1), "local batch of a pass 2 times outside"),
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
    assert reach_warnings(Reach()) == []


def test_a_few_more_workers_are_told_apart_from_far_more() -> None:
    assert reach_warnings(Reach(workers=1)) == ["2.0 times the workers that were calibrated"]
    assert "far outside" in reach_warnings(Reach(workers=5))[0]
    assert reach_warnings(Reach(workers=-1)) == ["2.0 times fewer workers than those that were calibrated"]
    assert reach_deviation(Reach(workers=-1)) == reach_deviation(Reach(workers=1))


def test_rows_that_disagree_widen_and_are_told() -> None:
    apart = Reach(lack_of_fit=0.2)
    assert reach_deviation(apart) > 4 * reach_deviation(Reach())
    assert "disagree with one another by 20%" in reach_warnings(apart)[0]


def test_deviations_add_in_squares() -> None:
    assert combine(3.0, 4.0) == pytest.approx(5.0)
