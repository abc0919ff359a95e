"""Mean, spread and comparison of a handful of runs.

Two arms are compared by Welch's t-test: a difference of means, its 95 % interval and a p value, without assuming that
both arms spread alike. What the interval says is put into one word (`Comparison.verdict`), so that "no difference was
found" is never mistaken for "they are equal": with three seeds an interval is wide, and an arm only counts as being
within a margin of another when the whole interval lies inside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtr, stdtrit  # Student's distribution and its inverse

__all__ = ["Comparison", "Spread", "compare", "holm", "spread"]

CONFIDENCE = 0.95


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
    """One arm less another: difference of means, its 95 % interval, two-sided p. NaN where n is too small to say."""

    difference: float
    low: float
    high: float
    p: float

    def verdict(self, margin: float) -> str:
        """What the interval says: a difference, equality within the margin, or neither."""
        if math.isnan(self.low):
            return "too few runs to say"
        inside = -margin <= self.low and self.high <= margin
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


def compare(values: Sequence[float], others: Sequence[float]) -> Comparison:
    """Welch's t-test of `values` against `others` (Welch 1947): the arms may differ in number and in spread."""
    one, two = spread(values), spread(others)
    difference = one.mean - two.mean
    if one.n < 2 or two.n < 2:
        return Comparison(difference, math.nan, math.nan, math.nan)
    variance_one, variance_two = one.std**2 / one.n, two.std**2 / two.n
    error = math.sqrt(variance_one + variance_two)
    if error == 0:
        return Comparison(difference, difference, difference, 1.0 if difference == 0 else 0.0)
    # Satterthwaite's degrees of freedom. `scipy.stats.ttest_ind` is not used: it warns when an arm has no spread.
    freedom = error**4 / (variance_one**2 / (one.n - 1) + variance_two**2 / (two.n - 1))
    half = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * error
    p = 2 * float(stdtr(freedom, -abs(difference) / error))
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
