"""The slowest of N: the formulas against draws, and against what can be worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megabatch.errors import DataError
from megabatch.plan.straggler import empirical_maximum, expected_maximum


@pytest.mark.parametrize("count", [1, 2, 3])
def test_small_worlds_are_exact(count: int) -> None:
    known = {1: 0.0, 2: 1 / math.sqrt(math.pi), 3: 1.5 / math.sqrt(math.pi)}
    assert expected_maximum(count) == pytest.approx(known[count], abs=1e-6)


@pytest.mark.parametrize("count", [8, 64, 1024, 6000])
def test_equals_the_mean_of_many_draws(count: int) -> None:
    draws = np.random.default_rng(5).standard_normal((600, count)).max(axis=1)
    error = draws.std() / math.sqrt(len(draws))
    assert expected_maximum(count) == pytest.approx(draws.mean(), abs=4 * error + 0.005)
    assert math.sqrt(2 * math.log(count)) > 1.1 * draws.mean()


def test_rises_with_the_world_and_joins_at_the_switch() -> None:
    values = [expected_maximum(count) for count in (1, 2, 8, 63, 64, 65, 512, 4095, 4096, 4097, 1_000_000)]
    assert values == sorted(values)
    assert expected_maximum(4097) - expected_maximum(4096) < 0.03


def test_measured_times_replace_the_law() -> None:
    times = np.random.default_rng(7).standard_t(3, size=5000) * 0.01 + 1
    draws = np.random.default_rng(8).choice(times, size=(20_000, 32)).max(axis=1)
    assert empirical_maximum(times.tolist(), 32) == pytest.approx(draws.mean(), rel=3e-3)
    assert empirical_maximum([1.0, 2.0, 3.0], 1) == pytest.approx(2.0)
    assert empirical_maximum([1.0, 2.0], 2) == pytest.approx(1.75)


def test_nonsense_is_refused() -> None:
    with pytest.raises(DataError, match="at least 1"):
        expected_maximum(0)
    with pytest.raises(DataError, match="at least 2"):
        empirical_maximum([1.0], 4)
    with pytest.raises(DataError, match="finite"):
        empirical_maximum([1.0, math.nan], 4)
