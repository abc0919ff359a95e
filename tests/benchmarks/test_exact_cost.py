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


def test_ratios_are_between_turns_of_one_round() -> None:
    found = summary([[2.0, 4.0, 9.0], [1.0, 4.0, 3.0]])
    assert found["ratio"] == pytest.approx(2.0)
    assert (found["exact_seconds"], found["float_seconds"], found["rounds"]) == (4.0, 3.0, 3)
