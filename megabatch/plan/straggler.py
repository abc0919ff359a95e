"""How long the slowest of N workers takes: every step waits for it.

Workers whose times scatter around a mean with deviation s finish together at mean + s * m(N), where m(N) is the
expected largest of N standard normal draws. The textbook sqrt(2 ln N) overstates it; for N > 4096 the refined form
of extreme-value theory is used,

    m(N) = r - (ln ln N + ln 4 pi) / (2 r) + 0.5772 / r,      r = sqrt(2 ln N)

and below that the integral itself. A heavy tail matters more than s does: with Student-t(3) noise of the same
deviation m is 8 instead of 3.2 at N = 1024. So measured times, where there are any, replace the normal law:
`empirical_maximum`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from megabatch.errors import DataError

__all__ = ["empirical_maximum", "expected_maximum"]

Array = np.ndarray[Any, np.dtype[np.float64]]

_EULER = 0.5772156649015329
_EXACT_UP_TO = 4096


@lru_cache(maxsize=4096)
def expected_maximum(world_size: int) -> float:
    """Expected largest of `world_size` standard normal draws; 0 for one worker."""
    if world_size < 1:
        raise DataError(f"{world_size} workers; the slowest of at least 1 is asked for")
    if world_size == 1:
        return 0.0
    if world_size <= _EXACT_UP_TO:
        return _exact_maximum(world_size)
    root = math.sqrt(2 * math.log(world_size))
    return root - (math.log(math.log(world_size)) + math.log(4 * math.pi)) / (2 * root) + _EULER / root


def empirical_maximum(times: Sequence[float], world_size: int) -> float:
    """Expected largest of `world_size` draws from measured times.

    The draws come from the measured ones, so the tail ends at the largest time seen: with fewer measurements than
    workers the result is a lower bound.
    """
    if len(times) < 2:
        raise DataError(f"{len(times)} measured times; the slowest worker needs at least 2 of them to be told")
    rising = np.sort(np.asarray(times, dtype=np.float64))
    if not np.all(np.isfinite(rising)) or rising[0] < 0:
        raise DataError("measured times must be finite and not negative; remove the rows that are not")
    at_most = (np.arange(len(rising) + 1) / len(rising)) ** world_size
    return float(np.sum(rising * np.diff(at_most)))


def _exact_maximum(world_size: int) -> float:
    """The integral of x d(Phi(x)^N), by the trapezium rule: exact to 1e-6 for what is asked here."""
    grid, phi, density = _normal_law()
    return float(np.trapezoid(grid * world_size * phi ** (world_size - 1) * density, grid))


@lru_cache(maxsize=1)
def _normal_law() -> tuple[Array, Array, Array]:
    grid = np.linspace(-8.0, 8.0, 2001)
    phi = 0.5 * (1 + np.array([math.erf(x / math.sqrt(2)) for x in grid]))
    return grid, phi, np.exp(-(grid**2) / 2) / math.sqrt(2 * math.pi)
