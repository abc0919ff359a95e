"""How far two arms differ, and what that is worth.

A difference of means with its 95 % interval and a p value, in one of two ways:

    compare         Welch's t-test: arms of any number of runs, which need not spread alike
    compare_pairs   Student's t of the differences, run by run, where runs of two arms belong together (one seed: the
                    same first weights, the same order of images); what pairs share does not widen the interval

What the interval says is put into one word (`Comparison.verdict`), so that "no difference was found" is never mistaken
for "they are equal": with three seeds an interval is wide, and an arm only counts as being within a margin of another
when the whole interval lies inside it. That is two one-sided tests at 2.5 % each (Schuirmann 1987).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scipy.special import stdtr, stdtrit  # Student's distribution and its inverse

CONFIDENCE = 0.95
Expected = Literal["", "worse", "better"]


@dataclass(frozen=True)
class Spread:
    """n values: mean, standard deviation of one value (n - 1 in the denominator; NaN for one value), extremes."""

    n: int
    mean: float
    std: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """One arm less another: difference of means, its 95 % interval, p. NaN where n is too small to say."""

    difference: float
    low: float
    high: float
    p: float

    def is_inside(self, margin: float) -> bool:
        """Whether the whole interval lies within the margin."""
        return -margin <= self.low and self.high <= margin

    def verdict(self, margin: float) -> str:
        """What the interval says: a difference, equality within the margin, or neither."""
        if math.isnan(self.low):
            return "too few runs to say"
        inside = self.is_inside(margin)
        if self.high < 0:
            return "worse, within the margin" if inside else "worse"
        if self.low > 0:
            return "better, within the margin" if inside else "better"
        if inside:
            return "equal within the margin"
        return "not worse by more than the margin" if self.low >= -margin else "undecided"


def spread(values: Sequence[float]) -> Spread:
    """Mean and spread of at least one value."""
    n = len(values)
    mean = math.fsum(values) / n
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1)) if n > 1 else math.nan
    return Spread(n, mean, std, min(values), max(values))


def compare(values: Sequence[float], others: Sequence[float], expected: Expected = "") -> Comparison:
    """Welch's t-test of `values` against `others` (Welch 1947): the arms may differ in number and in spread.

    expected: what the one-sided p is about; without it p is two-sided.
    """
    one, two = spread(values), spread(others)
    difference = one.mean - two.mean
    if one.n < 2 or two.n < 2:
        return Comparison(difference, math.nan, math.nan, math.nan)
    variance_one, variance_two = one.std**2 / one.n, two.std**2 / two.n
    error = math.sqrt(variance_one + variance_two)
    # Satterthwaite's degrees of freedom. `scipy.stats.ttest_ind` is not used: it warns when an arm has no spread.
    parts = variance_one**2 / (one.n - 1) + variance_two**2 / (two.n - 1)
    return _by_student(difference, error, error**4 / parts if parts else math.nan, expected)


def compare_pairs(values: Sequence[float], others: Sequence[float], expected: Expected = "") -> Comparison:
    """Student's t of the differences of two arms whose runs belong together, in the same order."""
    one = spread([value - other for value, other in zip(values, others, strict=True)])
    if one.n < 2:
        return Comparison(one.mean, math.nan, math.nan, math.nan)
    return _by_student(one.mean, one.std / math.sqrt(one.n), one.n - 1, expected)


def _by_student(difference: float, error: float, freedom: float, expected: Expected) -> Comparison:
    if error == 0:
        below = 0.5 if difference == 0 else float(difference > 0)
        half = 0.0
    else:
        below = float(stdtr(freedom, difference / error))
        half = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * error
    p = {"worse": below, "better": 1 - below, "": 2 * min(below, 1 - below)}[expected]
    return Comparison(difference, difference - half, difference + half, p)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p values made larger for being many (Holm 1979): any of those below 0.05 stands at 5 % for all together."""
    order = sorted(range(len(p_values)), key=lambda i: (math.isnan(p_values[i]), p_values[i]))
    tested = sum(not math.isnan(p) for p in p_values)
    adjusted, largest = [math.nan] * len(p_values), 0.0
    for place, index in enumerate(order[:tested]):
        largest = max(largest, min(1.0, (tested - place) * p_values[index]))
        adjusted[index] = largest
    return adjusted
