"""Comparisons of few runs, held against printed tables, direct integration, earlier numbers and simulated runs."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from megabatch.study.compare import Comparison, compare, compare_pairs, holm, spread

# Printed in every table of Student's t (two-sided 5 %, three decimals).
TABLE_975 = {2: 4.303, 4: 2.776, 10: 2.228, 30: 2.042, 120: 1.980}


@pytest.mark.parametrize(("freedom", "t"), TABLE_975.items())
def test_intervals_have_the_width_of_the_printed_table(freedom: int, t: float) -> None:
    """Two arms of n runs with one spread have 2(n - 1) degrees of freedom."""
    n = freedom // 2 + 1
    values = [math.sin(index) for index in range(n)]
    result = compare(values, [value - 1.0 for value in values])
    error = spread(values).std * math.sqrt(2 / n)
    assert (result.high - result.low) / 2 / error == pytest.approx(t, abs=5.1e-4)


@pytest.mark.parametrize(
    ("values", "others", "low", "high", "p"),
    [
        ([90.09, 91.25], [89.22, 89.8], -2.852743241441086, 5.172743241441108, 0.2585321337078239),
        ([89.74, 89.74, 91.9], [89.55, 89.49, 89.72], -2.1857282106478286, 3.9323948773144983, 0.348787801099689),
        (
            [91.13, 89.97, 90.59],
            [89.21, 89.39, 89.37, 89.1, 89.05, 89.01, 89.43],
            -0.031232777617508978,
            2.7121851585699,
            0.05230632227724005,
        ),
        ([1.0, 1.0], [2.0, 2.1], -1.6853102368086188, -0.41468976319138084, 0.03029234437673632),
    ],
)
def test_numbers_of_an_implementation_without_scipy(
    values: list[float], others: list[float], low: float, high: float, p: float
) -> None:
    result = compare(values, others)
    assert (result.low, result.high, result.p) == pytest.approx((low, high, p), rel=1e-9)


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
    assert result.p == pytest.approx(2 * _below(-5 / error, freedom), abs=1e-9)
    assert _below((result.high - 5.0) / error, freedom) == pytest.approx(0.975, abs=1e-9)
    assert 5.0 - result.low == pytest.approx(result.high - 5.0)


def _below(t: float, freedom: float) -> float:
    """The probability that a Student t is at most t, by the integral of its density."""
    grid = np.linspace(0.0, t, 200_001)
    norm = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    density = norm * (1 + grid**2 / freedom) ** (-(freedom + 1) / 2)
    return 0.5 + float(np.trapezoid(density, grid))


def test_intervals_hold_what_they_say_and_false_alarms_are_one_in_twenty() -> None:
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


def test_pairs_share_what_differs_between_seeds() -> None:
    """Differences 1, 2, 3: mean 2, error 1 / sqrt(3), two degrees of freedom."""
    result = compare_pairs([11.0, 52.0, 93.0], [10.0, 50.0, 90.0])
    error = 1 / math.sqrt(3)
    assert result.difference == 2.0
    assert (result.high - 2.0) / error == pytest.approx(TABLE_975[2], abs=5e-4)
    assert result.p == pytest.approx(2 * _below(-2 / error, 2), abs=1e-9)
    assert compare([11.0, 52.0, 93.0], [10.0, 50.0, 90.0]).p > 0.9  # which Welch's test cannot see
    assert math.isnan(compare_pairs([1.0], [2.0]).p)
    with pytest.raises(ValueError, match="zip"):
        compare_pairs([1.0, 2.0], [1.0])


@pytest.mark.parametrize("test", [compare, compare_pairs])
def test_one_sided_p(test: Callable[..., Comparison]) -> None:
    values, others = [1.0, 2.0, 2.5], [2.0, 3.5, 3.0]
    two, worse, better = (test(values, others, side).p for side in ("", "worse", "better"))
    assert worse == pytest.approx(two / 2)
    assert better == pytest.approx(1 - two / 2)
    assert test([1.0, 1.0], [2.0, 2.0], "worse").p == 0.0
    assert test([1.0, 1.0], [2.0, 2.0], "better").p == 1.0


def test_pairs_alarm_once_in_twenty_and_equality_is_rarely_claimed_at_the_margin() -> None:
    rng = np.random.default_rng(1)
    alarms = claimed = 0
    for _ in range(2000):
        shared = rng.normal(0.0, 3.0, 10)
        one, two = shared + rng.normal(0.0, 0.3, 10), shared + rng.normal(0.0, 0.3, 10)
        alarms += compare_pairs(one.tolist(), two.tolist()).p < 0.05
        claimed += compare_pairs((one - 0.5).tolist(), two.tolist()).is_inside(0.5)
    assert 0.035 < alarms / 2000 < 0.065
    assert claimed / 2000 < 0.035  # 2.5 % in the long run
