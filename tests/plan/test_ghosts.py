"""Ghosts over workers: as the engine deals them, and never a size that it would refuse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabatch.errors import ConfigError
from megabatch.plan.ghosts import busiest_passes, fitting_ghost
from megabatch.schedule.batch import check_whole_ghosts, parse_stages, shard_range
from tests.plan.laboratory import workload


def line(images: float) -> float:
    return 0.001 + 0.0003 * images


@given(ghosts=st.integers(1, 5000), workers=st.integers(1, 3000), ghost=st.integers(1, 64))
def test_the_busiest_worker_is_the_engines(ghosts: int, workers: int, ghost: int) -> None:
    dealt = max(len(shard_range(ghosts, workers, worker)) for worker in {0, workers - 1, workers // 2})
    assert busiest_passes(ghosts * ghost, ghost, workers) >= dealt
    everyone = max(len(shard_range(ghosts, workers, worker)) for worker in range(workers))
    assert busiest_passes(ghosts * ghost, ghost, workers) == everyone


def test_the_recipes_ghost_is_kept_while_it_fits() -> None:
    assert fitting_ghost(workload(32768, 32), 1024, line) == 32
    assert fitting_ghost(workload(32768, 32), 1000, line) == 32


@pytest.mark.parametrize(
    ("total", "ghost", "workers", "fits"),
    [(8192, 32, 1024, 8), (67840, 80, 1024, 80), (67840, 160, 1024, 80), (34816, 16, 4096, 16)],
)
def test_a_ghost_that_does_not_fit_shrinks_to_a_divisor(total: int, ghost: int, workers: int, fits: int) -> None:
    assert fitting_ghost(workload(total, ghost), workers, line) == fits


@given(parts=st.lists(st.integers(1, 40), min_size=1, max_size=3, unique=True), workers=st.integers(1, 600))
def test_what_is_chosen_divides_every_stage_and_is_the_better_neighbour_of_the_fair_share(
    parts: list[int], workers: int
) -> None:
    totals = sorted(48 * part for part in parts)
    load = workload(totals[0], 48).with_batch(parse_stages(" ".join(f"{i}:{t}" for i, t in enumerate(totals))))
    if totals[0] / workers < 2:
        with pytest.raises(ConfigError, match="at least 2 are needed"):
            fitting_ghost(load, workers, line)
        return
    ghost = fitting_ghost(load, workers, line)
    check_whole_ghosts(load.stages, ghost)

    def seconds(size: int) -> float:
        return sum(busiest_passes(total, size, workers) * line(size) / total for total in totals)

    if totals[0] // 48 < workers:
        sizes = [size for size in range(2, 49) if all(total % size == 0 for total in totals)]
        below = max((size for size in sizes if size * workers <= totals[0]), default=0)
        above = min((size for size in sizes if size * workers > totals[0]), default=0)
        assert ghost in (below, above)
        assert seconds(ghost) == pytest.approx(min(seconds(size) for size in (below, above) if size))


def test_a_batch_the_engine_would_refuse_is_refused() -> None:
    with pytest.raises(ConfigError, match="34817 is not a multiple"):
        fitting_ghost(workload(34817, 16), 4, line)
