"""Steps, bytes, transfers and divisions of every algorithm against closed forms and the papers' tables."""

from __future__ import annotations

import math
from collections import defaultdict
from fractions import Fraction

import pytest
import torch

from megabatch.comm.phases import (
    ALGORITHMS,
    SHORT_MESSAGE_BYTES,
    WORLD,
    divisions,
    equal_parts,
    halving_core,
    num_channels,
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
    sent = sum(phase.sent_share() for phase in phases(algorithm, sizes))
    assert sent == Fraction(2 * (ranks - 1), ranks)


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
    for num_bytes, channels in ((10**6, 1), (10**7, 2), (10**8, 4)):
        parts = phases("torus", grid, num_bytes, separate_links=True)
        assert num_channels(parts) == channels
        assert staggered(parts) == (channels > 1)
        assert num_steps(parts) == num_steps(phases("torus", grid))
        assert sum(phase.sent_share() for phase in parts) == sum(phase.sent_share() for phase in phases("torus", grid))
    # One axis has nothing to overlap with, and every other algorithm is what it is.
    assert num_channels(phases("torus", (1, 8), 10**8, separate_links=True)) == 1
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
    deep = phases("hierarchical", (2, 3, 4))
    assert [(phase.axis, phase.leaders) for phase in deep] == [
        (2, False),
        (1, True),
        (0, True),
        (1, True),
        (2, False),
    ]


@pytest.mark.parametrize(
    ("algorithm", "sizes", "parts"),
    [
        ("torus", (16, 8), 8),  # the row alone: what is left is all-reduced along the column at any length
        ("torus", (2, 3, 4), 12),
        ("direct", (4, 1), 1),  # one axis: a single all-reduce
        ("two_way_torus", (4, 6), 2 * 12),  # half of the message in 6 parts, half in 4
        ("ring", (16, 8), 1),
        ("hierarchical", (16, 8), 1),
        ("exchange", (16, 8), 1),
        ("backend", (16, 8), 1),
    ],
)
def test_messages_are_padded_only_where_the_backend_scatters_them(
    algorithm: str, sizes: tuple[int, ...], parts: int
) -> None:
    assert equal_parts(phases(algorithm, sizes)) == parts


def test_two_way_torus_keeps_both_axes_busy_with_half_each() -> None:
    both = phases("two_way_torus", (2, 4))
    assert num_channels(both) == 2
    assert [(phase.axis, phase.share) for phase in both if phase.channel == 0] == [
        (1, Fraction(1, 2)),
        (0, Fraction(1, 8)),
        (1, Fraction(1, 2)),
    ]
    assert [(phase.axis, phase.share) for phase in both if phase.channel == 1] == [
        (0, Fraction(1, 2)),
        (1, Fraction(1, 4)),
        (0, Fraction(1, 2)),
    ]
    assert num_channels(phases("two_way_torus", (2, 3, 4))) == 3
    assert num_channels(phases("two_way_torus", (1, 4))) == 1


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


@pytest.mark.parametrize("sizes", [(1, 5), (2, 2), (2, 3), (3, 4), (4, 1), (2, 3, 4), (2, 2, 2)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_transfers_are_the_steps_and_shares_of_every_rank(algorithm: str, sizes: tuple[int, ...]) -> None:
    grid = GridShape(sizes)
    for phase in phases(algorithm, grid):
        rounds = phase.transfers(grid)
        assert sum(one.count for one in rounds) == phase.num_steps
        sent: defaultdict[int, Fraction] = defaultdict(Fraction)
        for one in rounds:
            assert all(source != target for source, target in one.pairs)
            for source, _ in one.pairs:
                sent[source] += one.count * Fraction(one.share).limit_denominator(1000)
        for rank in range(grid.world_size):
            position = grid.coordinates(rank)
            takes_part = not phase.leaders or not any(position[phase.axis + 1 :])
            along = rank if phase.axis == WORLD else position[phase.axis]
            assert sent[rank] == (phase.sent_share(along) if takes_part else 0)


@pytest.mark.parametrize("sizes", [(1, 5), (2, 2), (2, 3), (3, 4), (2, 3, 4)])
@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "two_way_torus"])
def test_transfers_bring_every_contribution_to_every_rank(algorithm: str, sizes: tuple[int, ...]) -> None:
    """If every message carried all that its sender has; channels of the two-way torus do so only together."""
    grid = GridShape(sizes)
    held = [{rank} for rank in range(grid.world_size)]
    for phase in phases(algorithm, grid):
        for one in phase.transfers(grid):
            for _ in range(one.count):
                before = [set(known) for known in held]
                for source, target in one.pairs:
                    held[target] |= before[source]
    assert held == [set(range(grid.world_size))] * grid.world_size


def test_a_chain_moves_its_segments_one_hop_behind_each_other() -> None:
    reduce, _, broadcast = phases("hierarchical", (2, 3))
    assert [one.pairs for one in reduce.transfers(GridShape((2, 3)))] == [((2, 1), (5, 4)), ((1, 0), (4, 3))]
    rounds = broadcast.transfers(GridShape((1, 3)), segments=2)
    assert [one.pairs for one in rounds] == [((0, 1),), ((0, 1), (1, 2)), ((1, 2),)]
    assert {one.share for one in rounds} == {0.5}


@pytest.mark.parametrize("half_precision", [False, True])
@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (1, 5), (64, 64), (2, 3, 4)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_divisors_of_every_channel_multiply_to_the_number_of_ranks(
    algorithm: str, sizes: tuple[int, ...], half_precision: bool
) -> None:
    phase_list = phases(algorithm, sizes)
    divided = divisions(phase_list, half_precision=half_precision)
    for channel in range(num_channels(phase_list)):
        factors = [
            division.before * division.after
            for phase, division in zip(phase_list, divided, strict=True)
            if phase.channel == channel
        ]
        assert math.prod(factors) == math.prod(sizes)


def test_torus_divides_by_x_before_rows_and_by_y_before_columns() -> None:
    row, column, gather = divisions(phases("torus", (32, 64)), half_precision=True)
    assert (row.before, column.before, gather.before) == (64, 32, 1)
    assert (row.after, column.after, gather.after) == (1, 1, 1)


def _torus_in_half(values: torch.Tensor, before_row: float, before_column: float, after: float) -> torch.Tensor:
    """Sum `values[row, column]` in float16 hop by hop in the order of the torus, with the given divisors."""
    rows, columns = values.shape[:2]
    in_rows = values.half() / before_row
    row_sums = in_rows[:, 0]
    for column in range(1, columns):
        row_sums = row_sums + in_rows[:, column]
    in_columns = row_sums / before_column
    total = in_columns[0]
    for row in range(1, rows):
        total = total + in_columns[row]
    return total / after


@pytest.mark.parametrize("magnitude", [2e-5, 1e-3, 1.0, 1000.0, 60000.0])
def test_half_precision_survives_4096_ranks_where_other_divisions_fail(magnitude: float) -> None:
    generator = torch.Generator().manual_seed(7)
    values = magnitude * (0.9 + 0.1 * torch.rand(64, 64, 5, generator=generator))
    exact = values.half().double().mean(dim=(0, 1))
    row, column, _ = divisions(phases("torus", (64, 64)), half_precision=True)
    average = _torus_in_half(values, row.before, column.before, 1)
    # 126 roundings of half a unit in the last place; and values below 64 * 6.1e-5 become subnormal when divided,
    # where each of the 64 terms of both sums is off by up to 2**-25.
    torch.testing.assert_close(average.double(), exact, rtol=126 * 2**-11, atol=128 * 2**-25)
    assert (average > 0).all()

    divided_after = _torus_in_half(values, 1, 1, 4096)
    divided_first = _torus_in_half(values, 4096, 1, 1)
    if magnitude >= 1000:
        assert torch.isinf(divided_after).all()
    if magnitude <= 2e-5:
        assert (divided_first == 0).all()


def test_crossing_the_world_at_once_divides_half_before_and_half_after() -> None:
    (flat,) = divisions(phases("ring", (64, 64)), half_precision=True)
    assert (flat.before, flat.after) == (64, 64)
    (odd,) = divisions(phases("ring", (1, 6)), half_precision=True)
    assert odd.before * odd.after == 6
    (whole,) = divisions(phases("ring", (64, 64)), half_precision=False)
    assert (whole.before, whole.after) == (1, 4096)
