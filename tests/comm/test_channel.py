"""A rank that dies or hangs in any phase: every other rank ends in bounded time and names it. And `TaskThreads`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megabatch.comm.allreduce import AllReducer
from megabatch.comm.channel import TaskThreads
from megabatch.comm.grid import ProcessGrid
from megabatch.comm.primitives import PRIMITIVES, Primitive
from megabatch.comm.shared_memory import SHARED
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

    for table in (PRIMITIVES, SHARED):
        for pattern in ("ring", "direct"):
            patch.setitem(table, (operation, pattern), dying(table[operation, pattern]))


def _reduce_until_it_breaks(rank: int, phase: str, numel: int, shared: bool) -> None:
    if numel == LONG:
        os.environ["MEGABATCH_HOST"] = f"host{rank // 2}"  # rows inside hosts: a long message goes in several channels
    grid = ProcessGrid.build("2x2", timeout_seconds=60, shared_memory=shared)
    assert (1 in grid.memory) == shared
    with pytest.MonkeyPatch.context() as patch:
        AllReducer(grid).run(torch.ones(1000), task="warm-up")
        if rank == VICTIM:
            _die_in(phase, patch)
        # A rank far from the victim may still finish the first of these; none can finish the second.
        reducer = AllReducer(grid)
        reducer.run(torch.ones(numel), task="first")
        reducer.run(torch.ones(numel), task="second")


@pytest.mark.parametrize(
    ("phase", "numel", "shared"),
    [
        ("row reduce-scatter", 1000, False),
        ("column all-reduce", 1000, True),
        ("column all-reduce", 1000, False),
        ("row all-gather", 1000, True),
        ("column all-reduce", 100_000, False),
        ("row reduce-scatter", 100_000, True),
        ("column all-reduce", LONG, False),
        ("column all-reduce", LONG, True),  # rows through shared memory, columns not
    ],
)
def test_a_rank_that_dies_in_a_phase_is_named_by_every_other(phase: str, numel: int, shared: bool) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailureError) as caught:
        run_ranks(4, _reduce_until_it_breaks, phase, numel, shared)
    assert time.monotonic() - start < 50  # sooner than the timeout of 60 s: nobody waited it out
    reports = dict(re.findall(r"^megabatch\.errors\.CommunicationError: rank (\d), (.*)$", str(caught.value), re.M))
    assert sorted(reports) == ["0", "1", "2"]
    assert f"rank {VICTIM}: the process died without a word" in str(caught.value)
    for report in reports.values():
        assert f"not heard from: rank {VICTIM};" in report
        assert re.search(r": the connection to rank \d broke; not heard", report)
    if numel == LONG:
        return  # of several channels, one may hear first that another rank has hung up
    neighbour = reports["1" if phase.startswith("column") else "2"]
    assert neighbour.startswith(f"first, {phase}: the connection to rank {VICTIM} broke")


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
            assert 1 < seconds < 15  # timeout, then at most the failure report; the group itself would wait 20 s
        assert any("rank 3 did not answer within 1.5 s" in answer[case][0] for answer in answers)


def test_one_worker_runs_jobs_in_order_and_returns_results() -> None:
    workers = TaskThreads("test", 1)
    seen: list[int] = []

    def note(value: int) -> int:
        seen.append(value)
        return value

    futures = [workers.submit(partial(note, value)) for value in range(50)]
    assert [future.result(timeout=10) for future in futures] == list(range(50))
    assert seen == list(range(50))
    workers.stop(timeout_seconds=10)


def test_errors_reach_the_future_and_the_thread_goes_on() -> None:
    workers = TaskThreads("test", 1)

    def broken() -> None:
        raise ValueError("no")

    failed = workers.submit(broken)
    after = workers.submit(lambda: 3)
    with pytest.raises(ValueError, match="no"):
        failed.result(timeout=10)
    assert after.result(timeout=10) == 3
    workers.stop(timeout_seconds=10)


def test_two_workers_take_the_two_oldest_jobs() -> None:
    workers = TaskThreads("test", 2)
    both_in = threading.Barrier(2, timeout=10)
    first = workers.submit(both_in.wait)
    second = workers.submit(both_in.wait)  # would never pass if it waited for the first
    assert {first.result(timeout=10), second.result(timeout=10)} == {0, 1}
    workers.stop(timeout_seconds=10)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test-")]


def test_the_end_of_the_program_waits_for_a_job_but_not_for_ever() -> None:
    code = """
import time
from megabatch.comm.channel import TaskThreads
TaskThreads("short", 1).submit(lambda: (time.sleep(0.5), print("done", flush=True)))
TaskThreads("stuck", 2).submit(lambda: time.sleep(600))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n")
