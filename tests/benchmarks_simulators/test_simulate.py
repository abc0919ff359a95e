"""The simulation against the closed form and SimGrid's free-running ranks, and where the closed form cannot go."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from benchmarks.simulators.simulate import lock_step_seconds, rounds_of, simulate_all_reduce, simulate_steps
from megabatch.comm.phases import phases
from megabatch.comm.shape import GridShape, parse_grid
from megabatch.errors import ConfigError
from megabatch.plan.network import price_curve
from megabatch.plan.quantity import Quantity
from megabatch.plan.step import Candidate
from tests.plan.laboratory import laboratory, steps, workload

SIZE = 51.12e6
NETWORK = laboratory().network


@pytest.mark.parametrize(
    ("algorithm", "grid"),
    [
        *(("ring", "16"), ("ring", "30"), ("ring", "256")),
        *(("torus", "8x8"), ("torus", "16x16"), ("torus", "5x12"), ("torus", "2x3x4")),
        *(
            ("hierarchical", "16x4"),
            ("hierarchical", "12x8"),
            ("halving_doubling", "64"),
            ("halving_doubling", "256"),
        ),
        *(("direct", "4x8"), ("exchange", "4x4"), ("backend", "24")),
    ],
)
@pytest.mark.parametrize("software_us", [0, 20])
def test_lock_step_equals_the_closed_form(algorithm: str, grid: str, software_us: int) -> None:
    cluster = laboratory(software=f"[software]\nlatency_microseconds = {software_us}")
    shape = parse_grid(grid)
    if algorithm in ("direct", "exchange"):
        # Messages to many peers leave one after another: software the fluid knows nothing of.
        cluster = laboratory()
    closed = price_curve(cluster.network, algorithm, shape, 4).at(SIZE).seconds
    (channel,) = rounds_of(phases(algorithm, shape), shape, 4)
    played = lock_step_seconds(cluster.network, channel, shape.world_size, SIZE)
    assert played == pytest.approx(closed, rel=1e-3)


@pytest.mark.parametrize("grid", ["3x10", "6x16", "8x4"])
def test_chains_over_several_nodes_are_priced_as_ranks_run_them(grid: str) -> None:
    """A segment crosses each hop once; a common beat, which ranks do not keep, would be slower."""
    shape = parse_grid(grid)
    closed = price_curve(NETWORK, "hierarchical", shape).at(SIZE).seconds
    assert simulate_all_reduce(NETWORK, "hierarchical", shape, SIZE) == pytest.approx(closed, rel=1e-3)


def test_free_running_ranks_are_as_fast_as_simgrids() -> None:
    """SimGrid, 256 actors each going on by itself: 5.573 ms, against 5.629 in lock-step."""
    (channel,) = rounds_of(phases("torus", GridShape((16, 16))), GridShape((16, 16)))
    assert lock_step_seconds(NETWORK, channel, 256, SIZE) == pytest.approx(5.629e-3, rel=5e-3)


@pytest.mark.slow
def test_free_running_torus_of_256() -> None:
    free = simulate_all_reduce(NETWORK, "torus", GridShape((16, 16)), SIZE)
    assert free == pytest.approx(5.573e-3, rel=0.01)


@pytest.mark.parametrize(("algorithm", "grid"), [("ring", (16,)), ("torus", (4, 8)), ("halving_doubling", (16,))])
def test_free_running_ranks_are_never_slower_than_lock_step(algorithm: str, grid: tuple[int, ...]) -> None:
    shape = GridShape(grid)
    closed = laboratory().all_reduce(algorithm, shape, SIZE).seconds
    free = simulate_all_reduce(NETWORK, algorithm, shape, SIZE)
    assert 0.9 * closed < free <= 1.001 * closed


def test_channels_share_the_network() -> None:
    shape = GridShape((4, 8))
    both = simulate_all_reduce(NETWORK, "two_way_torus", shape, SIZE)
    assert both == pytest.approx(laboratory().all_reduce("two_way_torus", shape, SIZE).seconds, rel=0.25)


def test_start_skew_merely_adds() -> None:
    shape = GridShape((4, 4))
    late = np.abs(np.random.default_rng(2).standard_normal(16)) * 3e-3
    alone = simulate_all_reduce(NETWORK, "torus", shape, SIZE)
    skewed = simulate_all_reduce(NETWORK, "torus", shape, SIZE, start_seconds=late.tolist())
    assert skewed == pytest.approx(late.max() + alone, rel=0.012)


def test_another_job_on_one_nic_slows_everybody() -> None:
    shape = GridShape((16,))
    alone = simulate_all_reduce(NETWORK, "ring", shape, SIZE)
    busy = simulate_all_reduce(NETWORK, "ring", shape, SIZE, background=[(0, 12)])
    assert 1.7 * alone < busy < 2.1 * alone  # the ring's transfer out of that node gets half of its NIC
    inside = simulate_all_reduce(NETWORK, "ring", shape, SIZE, background=[(0, 2)])
    assert inside < 1.05 * alone  # a job inside the node leaves the NIC alone


def test_too_large_a_world_is_refused() -> None:
    with pytest.raises(ConfigError, match="use a smaller grid"):
        simulate_all_reduce(NETWORK, "ring", GridShape((4096,)), SIZE)


def test_steps_with_uneven_workers_take_what_the_closed_form_says() -> None:
    cluster = dataclasses.replace(laboratory(), jitter_seconds=Quantity(0.0007))
    candidate = Candidate(256, "torus", GridShape((16, 16)), 8.0)
    load = workload(8192)
    closed = steps(cluster, load).time(candidate, 8192)
    played = simulate_steps(cluster, load, candidate, closed.parts["compute"], 400)
    error = played.std() / np.sqrt(len(played))
    assert played.mean() == pytest.approx(closed.seconds, abs=4 * error + 0.003 * closed.seconds)
    still = dataclasses.replace(laboratory(straggler="relative_deviation = 1e-9"))
    exact = steps(still, load).time(candidate, 8192)
    assert simulate_steps(still, load, candidate, exact.parts["compute"], 3) == pytest.approx(exact.seconds, rel=1e-3)
