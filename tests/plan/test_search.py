"""The space of candidates: grids, ghosts that fit, batches whose convergence is known."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest

from megabatch.comm.shape import GridShape
from megabatch.errors import ConfigError
from megabatch.plan.convergence import mlperf_law
from megabatch.plan.predict import expected_seconds
from megabatch.plan.search import Space, best_batch, best_candidates, grids_of
from megabatch.schedule.batch import parse_stages
from tests.plan.laboratory import laboratory, workload


def test_grids_of_primes_and_of_huge_worlds() -> None:
    assert grids_of(7) == [GridShape((1, 7))]
    assert [grid.text for grid in grids_of(12)] == ["2x6", "3x4", "4x3", "6x2"]
    assert len(grids_of(1_000_000)) <= 12


def test_one_candidate_an_algorithm_best_first() -> None:
    best, tried = best_candidates(laboratory(), workload(), 64, Space())
    times = [expected_seconds(laboratory(), workload(), one) for one in best]
    assert all(a <= 1.01 * b for a, b in pairwise(times))
    assert len({one.algorithm for one in best}) == len(best) == 3
    assert tried == 9 * (1 + 2 * 5)
    (alone,), one = best_candidates(laboratory(), workload(), 1, Space())
    assert (alone.algorithm, one) == ("backend", 1)


def test_what_the_user_fixes_stays_fixed() -> None:
    best, tried = best_candidates(laboratory(), workload(), 64, Space(("torus",), GridShape((4, 16)), 8.0))
    assert (best[0].grid.text, best[0].bucket_mb, tried) == ("4x16", 8.0, 1)
    with pytest.raises(ConfigError, match="needs 64 workers"):
        best_candidates(laboratory(), workload(), 32, Space(grid=GridShape((4, 16))))


def test_batches_keep_the_shape_of_the_stages_and_the_known_range() -> None:
    load = workload(8192).with_batch(parse_stages("0:2048 30:4096"))
    best, _ = best_candidates(laboratory(), load, 256, Space(), mlperf_law())
    found, tried = best_batch(laboratory(), load, best, mlperf_law())
    assert tried > 3 * 8
    assert max(found.batch_totals) <= mlperf_law().batches[1]
    assert expected_seconds(
        laboratory(), load.with_batch(found), dataclasses.replace(best[0], ghost_batch=0), mlperf_law()
    ) < (expected_seconds(laboratory(), load, best[0], mlperf_law()))
