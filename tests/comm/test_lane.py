"""A rank that dies or hangs in any phase: every other rank ends in bounded time and names it."""

from __future__ import annotations

import os
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megabatch.comm import lane
from megabatch.comm.allreduce import AllReducer
from megabatch.comm.grid import ProcessGrid
from megabatch.comm.primitives import PRIMITIVES, Primitive
from megabatch.errors import CommunicationError
from tests.ranks import RankFailureError, run_ranks

LONG = 5_000_000  # elements
VICTIM = 3  # in a 2x2 grid: its row neighbour is 2, its column neighbour 1


def _die_in(phase: str, patch: pytest.MonkeyPatch) -> None:
    """Make this process end when its next all-reduce enters `phase`, with all its receives posted."""
    operation = {"row reduce-scatter": "reduce_scatter", "row all-gather": "all_gather"}.get(phase, "reduce_scatter")
    first_rank = 2 if phase.startswith("row") else 1

    def dying(alive: Primitive) -> Any:
        def run(link: Any, *args: Any) -> Any:
            going = alive(link, *args)
            next(going)
            yield
            if link.ranks[0] == first_rank:
                os._exit(1)
            yield from going

        return run

    for pattern in ("ring", "direct"):
        patch.setitem(PRIMITIVES, (operation, pattern), dying(PRIMITIVES[operation, pattern]))


def _reduce_until_it_breaks(rank: int, phase: str, numel: int) -> None:
    if numel == LONG:
        os.environ["MEGABATCH_HOST"] = f"host{rank // 2}"  # rows inside hosts: a long message goes in several lanes
    grid = ProcessGrid.build("2x2", timeout_seconds=60)
    with pytest.MonkeyPatch.context() as patch:
        AllReducer(grid).run(torch.ones(1000), task="warm-up")
        if rank == VICTIM:
            _die_in(phase, patch)
        # A rank far from the victim may still finish the first of these; none can finish the second.
        reducer = AllReducer(grid)
        reducer.run(torch.ones(numel), task="first")
        reducer.run(torch.ones(numel), task="second")


@pytest.mark.parametrize(
    ("phase", "numel"),
    [
        ("row reduce-scatter", 1000),
        ("column all-reduce", 1000),
        ("row all-gather", 1000),
        ("column all-reduce", 100_000),
        ("column all-reduce", LONG),
    ],
)
def test_a_rank_that_dies_in_a_phase_is_named_by_every_other(phase: str, numel: int) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailureError) as caught:
        run_ranks(4, _reduce_until_it_breaks, phase, numel)
    assert time.monotonic() - start < 50  # sooner than the timeout of 60 s: nobody waited it out
    reports = dict(re.findall(r"^megabatch\.errors\.CommunicationError: rank (\d), (.*)$", str(caught.value), re.M))
    assert sorted(reports) == ["0", "1", "2"]
    assert f"rank {VICTIM}: the process died without a word" in str(caught.value)
    for report in reports.values():
        assert f"not heard from: rank {VICTIM};" in report
        assert "closed its connection" in report or "already given up" in report
    if numel == LONG:
        return  # of several lanes, one may hear first that another rank has hung up
    neighbour = reports["1" if phase.startswith("column") else "2"]
    assert neighbour.startswith(f"first, {phase}: rank {VICTIM} closed its connection")


ALGORITHMS_THAT_HANG = ("torus", "two_way_torus")


def _one_hangs(rank: int) -> list[tuple[str, float]]:
    return [_hang(rank, algorithm) for algorithm in ALGORITHMS_THAT_HANG]


def _hang(rank: int, algorithm: str) -> tuple[str, float]:
    grid = ProcessGrid.build("2x2", timeout_seconds=20)
    AllReducer(grid, algorithm).run(torch.ones(10))
    grid.timeout_seconds = 1.5
    message = "was elsewhere"
    start = time.monotonic()
    if rank != 3:
        try:
            AllReducer(grid, algorithm).run(torch.ones(10), task="bucket 7")
        except CommunicationError as error:
            message = str(error)
    seconds = time.monotonic() - start
    dist.barrier()  # where rank 3 is waiting meanwhile
    return message, seconds


def test_a_rank_that_hangs_ends_the_others_within_the_timeout() -> None:
    answers = run_ranks(4, _one_hangs)
    for case in range(len(ALGORITHMS_THAT_HANG)):
        for rank, (message, seconds) in enumerate(answer[case] for answer in answers[:3]):
            assert message.startswith(f"rank {rank}, bucket 7, "), message
            assert "not heard from: rank 3;" in message
            assert "\n" not in message
            assert 1 < seconds < 15  # timeout, then at most the roll call; the group itself would wait 20 s
        assert any("rank 3 did not answer within 1.5 s" in answer[case][0] for answer in answers)


def test_seconds_of_the_halves_of_a_phase_are_joined() -> None:
    marks = [("", 0.0), ("row reduce-scatter", 1.0), ("column all-reduce", 3.0), ("column all-reduce", 6.0)]
    assert lane._seconds_by_phase(marks) == [("row reduce-scatter", 1.0), ("column all-reduce", 5.0)]
