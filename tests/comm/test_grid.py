"""ProcessGrid on real ranks and, for its size, on torch's fake process group."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megabatch.comm.allreduce import all_reduce
from megabatch.comm.grid import ProcessGrid, _axis_group, uses_gloo
from megabatch.comm.phases import WORLD
from megabatch.comm.rollcall import Note
from megabatch.comm.shape import GridShape
from megabatch.errors import CommunicationError, GridError, LaunchError
from tests.ranks import run_ranks


def _describe(rank: int) -> dict[str, Any]:
    grid = ProcessGrid.build("2x3", timeout_seconds=20)
    row, column = grid.group(1), grid.group(0)
    told = torch.tensor([rank])
    in_row = [torch.zeros_like(told) for _ in range(3)]
    dist.all_gather(in_row, told, group=row)
    facts = {
        "coordinates": grid.coordinates,
        "row": grid.axis_ranks(1),
        "row heard": [int(value) for value in in_row],
        "row group": dist.get_process_group_ranks(row),
        "column group": dist.get_process_group_ranks(column),
        "positions": (grid.axis_position(0), grid.axis_position(1), grid.axis_position(WORLD)),
        "sizes": (grid.axis_size(0), grid.axis_size(1), grid.axis_size(WORLD)),
        "world group": grid.group(WORLD) is grid.group(WORLD) is not dist.group.WORLD,
        "hosts": len(set(grid.hosts)),
        "gloo": uses_gloo(row),
        "calls": (grid.next_call(), grid.next_call()),
    }
    flat = ProcessGrid.build((1, 6))  # an axis of one rank has no group, and a second grid may stand beside the first
    facts["flat"] = dist.get_process_group_ranks(flat.group(1))
    facts["chosen"] = ProcessGrid.build().shape.text  # one host: near square
    flat.close()
    grid.close()
    facts["problems"] = [_error("4x2", rank), _error("2x3" if rank else "3x2", rank)]
    return facts


def _build_again_and_again(rank: int) -> list[float]:
    sums = []
    for build in range(3):
        if rank == 1:  # a group of its own, which the others do not count
            dist.new_group([1], use_local_synchronization=True)
        grid = ProcessGrid.build("2x2", timeout_seconds=20)
        told = torch.full((5,), float(rank + build))
        all_reduce(told, grid, "torus")
        all_reduce(told, grid, "ring")  # over a group of the whole world
        sums.append(float(told[4]))
        grid.close()
    return sums


def test_a_closed_grid_can_be_built_again() -> None:
    for sums in run_ranks(4, _build_again_and_again):
        assert sums == [4.0 * (0 + 1 + 2 + 3 + 4 * build) for build in range(3)]


def _error(shape: str, rank: int) -> str:
    try:
        ProcessGrid.build(shape, timeout_seconds=20)
    except GridError as error:
        return str(error)
    return "none"


def test_real_ranks_form_rows_and_columns() -> None:
    facts = run_ranks(6, _describe)
    for rank, fact in enumerate(facts):
        row, column = divmod(rank, 3)
        assert fact["coordinates"] == (row, column)
        assert fact["row"] == tuple(range(3 * row, 3 * row + 3))
        assert fact["row heard"] == fact["row group"] == list(fact["row"])
        assert fact["column group"] == [column, column + 3]
        assert fact["positions"] == (row, column, rank)
        assert fact["sizes"] == (2, 3, 6)
        assert fact["world group"]
        assert fact["hosts"] == 1
        assert fact["gloo"]
        assert fact["calls"] == (0, 1)
        assert fact["flat"] == list(range(6))
        assert fact["chosen"] == "2x3"
        assert fact["problems"] == [
            "grid 4x2 needs 8 workers but the world has 6; shapes that fit: 1x6, 2x3, 3x2, 6x1",
            (
                "grid shapes differ between workers (3x2 on rank 0; 2x3 on rank 1, 2, 3, 4, 5); "
                "give every worker the same shape"
            ),
        ]


def test_needs_a_world_first() -> None:
    with pytest.raises(LaunchError, match=r"call torch\.distributed\.init_process_group before"):
        ProcessGrid.build("1x1")


@pytest.fixture
def fake_world_of_4096() -> Any:
    dist.init_process_group("fake", store=FakeStore(), rank=4095, world_size=4096)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake_world_of_4096")
def test_4096_ranks_cost_this_rank_two_groups_of_64() -> None:
    start = time.monotonic()
    grid = ProcessGrid.build("64x64", agree=False)
    assert grid.coordinates == (63, 63)
    assert grid.axis_ranks(1) == tuple(range(4032, 4096))
    assert grid.axis_ranks(0) == tuple(range(63, 4096, 64))
    assert grid.group(0).size() == grid.group(1).size() == 64
    # No judgement of speed, only that nothing here takes a step per pair of ranks.
    assert time.monotonic() - start < 30
    with pytest.raises(GridError, match="give a shape or leave agree on"):
        ProcessGrid.build(agree=False)


def test_a_broken_grid_stays_broken_and_says_why() -> None:
    grid = ProcessGrid(GridShape((2, 2)), 0, [None, None])
    note = Note(0, "bucket 1", "row all-gather", 4, "10 float32", 1, "rank 1 closed its connection")
    first = grid.fail(note)
    later = grid.fail(Note(0, "bucket 2", "row all-gather", 5, "10 float32", 1, "pair closed"))
    assert str(first) == str(later)
    assert str(first).startswith("rank 0, bucket 1, row all-gather: rank 1 closed its connection;")
    for use in (grid.check_usable, grid.next_call):
        with pytest.raises(CommunicationError, match="bucket 1, row all-gather"):
            use()


def test_groups_that_cannot_connect_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_route(*args: object, **options: object) -> None:
        raise RuntimeError("connect: No route to host\nstack")

    monkeypatch.setattr(dist, "new_group", no_route)
    with pytest.raises(LaunchError) as caught:
        _axis_group(GridShape((2, 64)), 0, 1, 5.0, "build")
    assert str(caught.value) == (
        "the row of ranks 0, 1, 2, 3, 4, 5, 6, 7, ... could not connect within 5 s (connect: No route to host); "
        "look at their logs and at the network between them"
    )
