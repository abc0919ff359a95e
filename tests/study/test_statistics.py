"""Comparisons of few runs, against printed tables, direct integration and simulated runs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megabatch.study.statistics import Comparison, compare, holm, spread, student_probability, student_quantile

# Printed in every table of Student's t (two-sided 5 %, three decimals).
TABLE_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 30: 2.042, 120: 1.980}


@pytest.mark.parametrize(("freedom", "t"), TABLE_975.items())
def test_quantiles_of_the_printed_table(freedom: int, t: float) -> None:
    assert student_quantile(0.975, freedom) == pytest.approx(t, abs=5.1e-4)
    assert student_quantile(0.025, freedom) == -student_quantile(0.975, freedom)


@pytest.mark.parametrize("freedom", [1.0, 2.0, 2.37, 4.0, 7.9, 55.0])
@pytest.mark.parametrize("t", [-9.0, -2.5, -0.3, 0.0, 0.8, 4.0])
def test_probability_equals_the_integral_of_the_density(freedom: float, t: float) -> None:
    grid = np.linspace(0.0, t, 200_001)
    norm = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    density = norm * (1 + grid**2 / freedom) ** (-(freedom + 1) / 2)
    assert student_probability(t, freedom) == pytest.approx(0.5 + float(np.trapezoid(density, grid)), abs=1e-9)


def test_one_and_two_degrees_have_closed_forms() -> None:
    for t in (-3.0, -0.1, 0.0, 1.7):
        assert student_probability(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-13)
        assert student_probability(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-13)


def test_spread() -> None:
    assert spread([1.0, 2.0, 6.0]).mean == 3.0
    assert spread([1.0, 2.0, 6.0]).std == pytest.approx(float(np.std([1, 2, 6], ddof=1)))
    assert (spread([1.0, 2.0, 6.0]).low, spread([1.0, 2.0, 6.0]).high) == (1.0, 6.0)
    assert math.isnan(spread([5.0]).std)


def test_welch_by_hand() -> None:
    """n = 3 and 3, variances 1 and 4: error^2 = 5/3, degrees (5/3)^2 / (1/18 + 16/18) = 50/17, t = 5 / sqrt(5/3)."""
    result = compare([11.0, 12.0, 13.0], [5.0, 7.0, 9.0])
    error, freedom = math.sqrt(5 / 3), 50 / 17
    assert result.difference == 5.0
    assert result.p == pytest.approx(2 * student_probability(-5 / error, freedom), rel=1e-12)
    assert result.high - 5.0 == pytest.approx(student_quantile(0.975, freedom) * error, rel=1e-9)
    assert 5.0 - result.low == pytest.approx(result.high - 5.0)


def test_intervals_hold_what_they_reference_and_false_alarms_are_one_in_twenty() -> None:
    rng = np.random.default_rng(0)
    held = alarms = 0
    for _ in range(2000):
        one, two = rng.normal(1.0, 1.0, 5), rng.normal(0.0, 1.0, 5)
        result = compare(one.tolist(), two.tolist())
        held += result.low <= 1.0 <= result.high
        alarms += compare((one - 1.0).tolist(), two.tolist()).p < 0.05
    assert 0.94 < held / 2000 < 0.965
    assert 0.035 < alarms / 2000 < 0.06


def test_too_few_runs_and_no_spread() -> None:
    lonely = compare([1.0], [2.0, 3.0])
    assert lonely.difference == -1.5
    assert math.isnan(lonely.p)
    assert lonely.verdict(9.0) == "too few runs to say"
    assert compare([1.0, 1.0], [1.0, 1.0]).p == 1.0
    assert compare([1.0, 1.0], [2.0, 2.0]).verdict(0.5) == "worse"


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-2.0, -0.1, "worse"),
        (-0.4, -0.1, "worse, within the margin"),
        (-0.4, 0.3, "equal within the margin"),
        (-0.4, 0.9, "not worse by more than the margin"),
        (-0.6, 0.9, "undecided"),
        (-0.6, 0.1, "undecided"),
        (0.1, 0.9, "better"),
        (0.1, 0.4, "better, within the margin"),
    ],
)
def test_verdicts(low: float, high: float, verdict: str) -> None:
    assert Comparison((low + high) / 2, low, high, 0.5).verdict(0.5) == verdict


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    mixed = holm([math.nan, 0.02])
    assert math.isnan(mixed[0])
    assert mixed[1] == 0.02
    assert holm([]) == []
