"""The space of candidates: grids, ghosts that fit, batches whose convergence is known."""

from __future__ import annotations

from itertools import pairwise

import pytest

from megabatch.comm.shape import GridShape
from megabatch.errors import ConfigError
from megabatch.plan.convergence import mlperf_law
from megabatch.plan.predict import expected_seconds
from megabatch.plan.search import Space, best_batch, best_candidates, grids_of, loads_near
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


def test_loads_near_a_batch_by_hand() -> None:
    """96 workers, ghost 32, near 10,000: 312.5 ghosts; 104 images a worker, hence 3 ghosts each."""
    law = mlperf_law()
    thirds = {total: f"{round(law.at(total).epochs / 3, 1):g}" for total in (9984, 9216)}
    found = {(str(load.stages), load.ghost_batch_size) for load in loads_near(workload(2048), 96, 10_000, law)}
    assert found == {
        ("9,984", 32),
        (f"9,984 from epoch 0, 19,968 from epoch {thirds[9984]}", 32),
        ("9,216", 32),
        (f"9,216 from epoch 0, 18,432 from epoch {thirds[9216]}", 32),
    }
    # Fewer images than a ghost: the ghost becomes a worker's share.
    few = {(str(load.stages), load.ghost_batch_size) for load in loads_near(workload(2048), 1000, 10_000, law)}
    assert ("10,000", 10) in few
    # The shape of the recipe's own stages, and nothing beyond what is known.
    staged = workload(8192).with_batch(parse_stages("0:2048 30:4096"), fixed=False)
    (shaped,) = (
        load.stages for load in loads_near(staged, 8, 4096, law, doubled=False) if load.stages.global_batch_sizes[1:]
    )
    assert shaped.global_batch_sizes == (4096, 8192)
    assert shaped.from_epochs == staged.stages.from_epochs  # of 90 epochs, as the recipe's are
    assert loads_near(staged, 8, 2 * law.batches[1], law) == []
    assert loads_near(staged, 8, law.batches[0] / 4, law) == []


def test_no_batch_by_hand_beats_the_searched_one() -> None:
    law, cluster = mlperf_law(), laboratory()
    for count, own in ((1, 65536), (100, 2048), (640, 67840), (1000, 13056)):
        ghost = 424 if own == 67840 else 32
        load = workload(own, ghost)
        best, _ = best_candidates(cluster, load, count, Space(), law) if own >= 2 * count else ([], 0)
        found, tried = best_batch(cluster, load, count, best, Space(), law)
        assert tried > 15
        seconds = expected_seconds(cluster, found, best_candidates(cluster, found, count, Space(), law)[0][0], law)
        for total in range(ghost * (1632 // ghost + 1), 67840, ghost * max(1, 2400 // ghost)):
            other = load.with_batch(parse_stages(total))
            if total >= 2 * count:
                way = best_candidates(cluster, other, count, Space(("torus",)), law)[0][0]
                assert seconds <= 1.02 * expected_seconds(cluster, other, way, law)


def test_the_recipes_own_batch_is_not_left_for_a_draw() -> None:
    law, cluster = mlperf_law(), laboratory()
    best, _ = best_candidates(cluster, workload(), 256, Space(), law)
    found, _ = best_batch(cluster, workload(), 256, best, Space(), law)
    assert found.stages.global_batch_sizes != (32768,)
    near = workload(256 * (found.ghost_batch_size + 1), found.ghost_batch_size + 1)
    again, _ = best_candidates(cluster, near, 256, Space(), law)
    assert best_batch(cluster, near, 256, again, Space(), law)[0] is near


def test_a_batch_too_small_for_the_workers_is_no_end() -> None:
    law = mlperf_law()
    found, _ = best_batch(laboratory(), workload(1632, 8), 1024, [], Space(), law)
    assert found.stages.global_batch_sizes[0] >= 2 * 1024
    with pytest.raises(ConfigError, match="no total batch from 816 to 67,840"):
        best_batch(laboratory(), workload(1632, 8), 100_000, [], Space(), law)
