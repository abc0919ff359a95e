"""Steps and bytes of every algorithm against closed forms and the papers' tables."""

from __future__ import annotations

from fractions import Fraction

import pytest

from megabatch.comm.phases import (
    ALGORITHMS,
    SHORT_MESSAGE_BYTES,
    WORLD,
    bytes_sent_per_rank,
    halving_core,
    num_lanes,
    num_steps,
    phases,
    staggered,
    torus_phases,
)
from megabatch.comm.shape import GridShape
from megabatch.errors import ConfigError

GRIDS = [(1, 4), (4, 1), (2, 2), (2, 3), (3, 5), (4, 4), (2, 3, 4), (32, 64)]


def test_torus_is_the_three_phases_of_the_paper() -> None:
    names = [phase.name(("column", "row")) for phase in phases("torus", (2, 4))]
    assert names == ["row reduce-scatter", "column all-reduce", "row all-gather"]
    assert [phase.share for phase in phases("torus", (2, 4))] == [1, Fraction(1, 4), 1]
    assert [phase.num_steps for phase in phases("torus", (2, 4))] == [3, 2, 3]


@pytest.mark.parametrize(
    ("sizes", "ring_steps", "torus_steps"),
    [((32, 32), 2046, 124), ((32, 64), 4094, 188), ((48, 72), 6910, 236), ((34, 32), 2174, 128)],
)
def test_steps_on_the_grids_of_mikami2018(sizes: tuple[int, int], ring_steps: int, torus_steps: int) -> None:
    assert num_steps(phases("ring", sizes)) == ring_steps
    assert num_steps(phases("torus", sizes)) == torus_steps


@pytest.mark.parametrize("sizes", GRIDS)
@pytest.mark.parametrize("algorithm", ["ring", "torus", "two_way_torus", "direct", "backend"])
def test_ring_like_algorithms_send_the_least_possible(algorithm: str, sizes: tuple[int, ...]) -> None:
    ranks = GridShape(sizes).world_size
    sent = bytes_sent_per_rank(phases(algorithm, sizes), 1_000_000)
    assert sent == pytest.approx(2 * 1_000_000 * (ranks - 1) / ranks, rel=1e-12)


@pytest.mark.parametrize("sizes", GRIDS)
def test_steps_follow_the_closed_forms(sizes: tuple[int, ...]) -> None:
    ranks = GridShape(sizes).world_size
    around = sum(2 * (size - 1) for size in sizes)
    hops = sum(size > 1 for size in sizes)
    assert num_steps(phases("ring", sizes)) == 2 * (ranks - 1)
    assert num_steps(phases("torus", sizes)) == around
    assert num_steps(phases("two_way_torus", sizes)) == around
    assert num_steps(phases("hierarchical", sizes)) == around
    assert num_steps(phases("direct", sizes)) == 2 * hops
    assert num_steps(phases("exchange", sizes)) == hops
    core, extra = halving_core(ranks)
    assert num_steps(phases("halving_doubling", sizes)) == 2 * (core.bit_length() - 1) + (2 if extra else 0)


def test_the_torus_takes_the_form_that_suits_the_message() -> None:
    grid = (4, 4)
    assert phases("torus", grid, SHORT_MESSAGE_BYTES) == phases("direct", grid)
    assert phases("torus", grid, SHORT_MESSAGE_BYTES + 1) == phases("torus", grid)
    assert phases("torus", grid, 10**9) == phases("torus", grid)
    assert not staggered(phases("torus", grid))
    assert not staggered(phases("two_way_torus", grid))
    for num_bytes, lanes in ((10**6, 1), (10**7, 2), (10**8, 4)):
        parts = phases("torus", grid, num_bytes, separate_links=True)
        assert num_lanes(parts) == lanes
        assert staggered(parts) == (lanes > 1)
        assert num_steps(parts) == num_steps(phases("torus", grid))
        assert bytes_sent_per_rank(parts, 10**6) == bytes_sent_per_rank(phases("torus", grid), 10**6)
    # One axis has nothing to overlap with, and every other algorithm is what it is.
    assert num_lanes(phases("torus", (1, 8), 10**8, separate_links=True)) == 1
    for algorithm in set(ALGORITHMS) - {"torus"}:
        assert phases(algorithm, grid, 10**8, separate_links=True) == phases(algorithm, grid)


def test_halving_doubling_of_powers_of_two_and_others() -> None:
    (phase,) = phases("halving_doubling", (2, 4))
    assert [(step.share, step.distance) for step in phase.steps()] == [
        (Fraction(1, 2), 4),
        (Fraction(1, 4), 2),
        (Fraction(1, 8), 1),
        (Fraction(1, 8), 1),
        (Fraction(1, 4), 2),
        (Fraction(1, 2), 4),
    ]
    assert {phase.sent_share(position) for position in range(8)} == {Fraction(7, 4)}
    (odd,) = phases("halving_doubling", (2, 3))
    # 6 ranks: 0-1 and 2-3 pair up, 4 and 5 stand alone, and four of them halve.
    shares = [odd.sent_share(position) for position in range(6)]
    assert shares == [Fraction(5, 2), 1, Fraction(5, 2), 1, Fraction(3, 2), Fraction(3, 2)]
    assert odd.sent_share() == Fraction(5, 2)


def test_hierarchical_sends_the_whole_message_through_leaders() -> None:
    reduce, middle, broadcast = phases("hierarchical", (4, 3))
    assert (reduce.operation, middle.operation, broadcast.operation) == ("reduce", "all_reduce", "broadcast")
    assert not reduce.leaders
    assert middle.leaders
    assert middle.share == 1  # the torus sends a third of it here
    assert [reduce.sent_share(position) for position in range(3)] == [0, 1, 1]
    assert [broadcast.sent_share(position) for position in range(3)] == [1, 1, 0]
    assert reduce.pipelined
    assert not middle.pipelined
    deep = phases("hierarchical", (2, 3, 4))
    assert [(phase.axis, phase.leaders) for phase in deep] == [
        (2, False),
        (1, True),
        (0, True),
        (1, True),
        (2, False),
    ]


def test_two_way_torus_keeps_both_axes_busy_with_half_each() -> None:
    both = phases("two_way_torus", (2, 4))
    assert num_lanes(both) == 2
    assert [(phase.axis, phase.share) for phase in both if phase.lane == 0] == [
        (1, Fraction(1, 2)),
        (0, Fraction(1, 8)),
        (1, Fraction(1, 2)),
    ]
    assert [(phase.axis, phase.share) for phase in both if phase.lane == 1] == [
        (0, Fraction(1, 2)),
        (1, Fraction(1, 4)),
        (0, Fraction(1, 2)),
    ]
    assert num_lanes(phases("two_way_torus", (2, 3, 4))) == 3
    assert num_lanes(phases("two_way_torus", (1, 4))) == 1


def test_torus_over_many_axes_nests() -> None:
    nested = torus_phases(GridShape((2, 3, 4)), (2, 1, 0))
    assert [(phase.operation, phase.axis, phase.share) for phase in nested] == [
        ("reduce_scatter", 2, 1),
        ("reduce_scatter", 1, Fraction(1, 4)),
        ("all_reduce", 0, Fraction(1, 12)),
        ("all_gather", 1, Fraction(1, 4)),
        ("all_gather", 2, 1),
    ]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_degenerate_grids_and_names(algorithm: str) -> None:
    assert phases(algorithm, (1, 1)) == ()
    assert num_steps(()) == 0
    for phase in phases(algorithm, (1, 4)):
        assert phase.axis in (1, WORLD)
        assert phase.size == 4
    for phase in phases(algorithm, (2, 2)):
        assert phase.name(("column", "row")).split()[0] in ("row", "column", "world")


def test_unknown_algorithm_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'tours' is unknown; choose one of ring, .*; did you mean 'torus'"):
        phases("tours", (2, 2))
