from __future__ import annotations

import random

import pytest

from benchmarks.exact_cost import interval_of_median, summary


def test_the_interval_of_a_median_is_that_of_the_tables() -> None:
    """Ranks of the sign test's 95 % interval, as tables of order statistics have them."""
    for count, low, high in ((6, 1, 6), (10, 2, 9), (20, 6, 15), (40, 14, 27)):
        values = list(range(1, count + 1))
        random.Random(0).shuffle(values)
        assert interval_of_median(values) == (low, high)


def test_ratios_are_between_turns_of_one_round_and_of_one_repeat() -> None:
    repeats = [
        {"float": [1.0, 4.0, 3.0], "exact": [2.0, 4.0, 9.0], "twin": [1.0, 4.0, 3.0]},  # 2, 1, 3
        {"float": [10.0, 10.0, 10.0], "exact": [10.0, 30.0, 40.0], "twin": [10.0, 10.0, 20.0]},  # 1, 3, 4
    ]
    found = summary(repeats, "exact")
    assert found["ratio"] == pytest.approx(2.5)  # of the medians 2 and 3
    assert found["interval"] == [2.0, 3.0]
    assert (found["repeats"], found["rounds"]) == (2, 3)
    assert summary(repeats, "twin")["ratio"] == 1.0
