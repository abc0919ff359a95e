"""Grid arithmetic against numpy's own row-major layout, and the errors a wrong shape gives."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from megabatch.comm.shape import GridShape, default_shape, fitting_shapes, near_square, parse_grid, ranks_text
from megabatch.errors import GridError


@pytest.mark.parametrize("sizes", [(1, 5), (5, 1), (2, 3), (4, 4), (2, 3, 4), (2, 1, 3, 2)])
def test_layout_is_row_major_along_every_axis(sizes: tuple[int, ...]) -> None:
    shape = GridShape(sizes)
    layout = np.arange(np.prod(sizes)).reshape(sizes)
    for rank in range(shape.world_size):
        position = shape.coordinates(rank)
        assert layout[position] == rank
        for axis in range(len(sizes)):
            line = layout[tuple(slice(None) if other == axis else position[other] for other in range(len(sizes)))]
            assert shape.axis_ranks(rank, axis) == tuple(line)
            assert shape.axis_ranks(rank, axis)[position[axis]] == rank


def test_parses_what_is_typed() -> None:
    assert parse_grid("2x4").sizes == (2, 4)
    assert parse_grid(" 2X3x4 ").text == "2x3x4"
    assert parse_grid("2x3x4").names == ("axis 0", "axis 1", "row")
    assert parse_grid("2x4").names == ("column", "row")
    assert parse_grid("2x4", ["host", "rail"]).names == ("host", "rail")


@pytest.mark.parametrize("text", ["", "x", "2x", "2*4", "-2x4", "2x4.0", "axb", "2x\u0664"])
def test_refuses_what_is_no_shape(text: str) -> None:
    with pytest.raises(GridError, match="is not a shape; give sizes joined by x"):
        parse_grid(text)


def test_refuses_axes_without_ranks_and_wrong_names() -> None:
    with pytest.raises(GridError, match="grid 0x4 has an axis without ranks"):
        parse_grid("0x4")
    with pytest.raises(GridError, match="give 2 different names"):
        GridShape((2, 4), ("row",))
    with pytest.raises(GridError, match="give 2 different names"):
        GridShape((2, 4), ("row", "row"))


def test_a_grid_that_does_not_fit_names_those_that_do() -> None:
    with pytest.raises(GridError) as caught:
        parse_grid("3x4").check_fits(8)
    assert str(caught.value) == ("grid 3x4 needs 12 workers but the world has 8; shapes that fit: 1x8, 2x4, 4x2, 8x1")
    parse_grid("2x4").check_fits(8)


@pytest.mark.parametrize("rank", [8, -1])
def test_ranks_outside_are_refused(rank: int) -> None:
    with pytest.raises(GridError, match=f"rank {rank} is outside grid 2x4; ranks are 0 to 7"):
        parse_grid("2x4").coordinates(rank)


@pytest.mark.parametrize(
    ("world_size", "text"), [(1, "1x1"), (7, "1x7"), (12, "3x4"), (1024, "32x32"), (2048, "32x64"), (3456, "54x64")]
)
def test_near_square_has_the_fewest_steps(world_size: int, text: str) -> None:
    chosen = near_square(world_size)
    assert chosen.text == text
    assert sum(chosen.sizes) == min(sum(shape.sizes) for shape in fitting_shapes(world_size))


@pytest.mark.parametrize(
    ("hosts", "text", "reason"),
    [
        ("aabb", "2x2", "one host per row"),
        ("aaaabbbb", "2x4", "one host per row"),
        ("aaabbbccc", "3x3", "one host per row"),
        ("aaaabb", "3x2", "rows within hosts"),  # uneven: rows of 2
        ("aaaaaabbbbbbbbb", "5x3", "rows within hosts"),
        ("aabbaa", "3x2", "rows within hosts"),  # a host in two pieces
        ("a", "1x1", "near square"),
        ("aaaa", "2x2", "near square"),  # one host: nothing is slow
        ("aaaaaaa", "1x7", "near square"),
        ("abcd", "2x2", "near square"),  # one rank each
        ("aab", "1x3", "near square"),  # no common length over 1
        ("abab", "2x2", "near square"),  # not consecutive
    ],
)
def test_rows_stay_within_hosts_where_they_can(hosts: str, text: str, reason: str) -> None:
    shape, why = default_shape(list(hosts))
    assert shape.text == text
    assert why.startswith(reason)
    rows = [set(hosts[line[0] : line[-1] + 1]) for line in shape.lines(1)]
    assert reason == "near square" or all(len(row) == 1 for row in rows)


def test_planning_needs_no_torch() -> None:
    code = "import sys, megabatch.comm.phases, megabatch.comm.calibration; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_ranks_for_people_are_cut_short() -> None:
    assert [ranks_text(ranks) for ranks in ([3], [0, 1], [4, 5, 6], [0, 2, 3])] == [
        "rank 3",
        "ranks 0, 1",
        "ranks 4 to 6",
        "ranks 0, 2, 3",
    ]
    assert ranks_text(range(0, 30, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 7 more"
