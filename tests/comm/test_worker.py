"""Jobs run in order, errors come back, and no thread outlives `stop`."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial

import pytest

from megabatch.comm.worker import Workers


def test_one_worker_runs_jobs_in_order_and_returns_results() -> None:
    workers = Workers("test", 1)
    seen: list[int] = []

    def note(value: int) -> int:
        seen.append(value)
        return value

    futures = [workers.submit(partial(note, value)) for value in range(50)]
    assert [future.result(timeout=10) for future in futures] == list(range(50))
    assert seen == list(range(50))
    workers.stop(timeout_seconds=10)


def test_errors_reach_the_future_and_the_thread_goes_on() -> None:
    workers = Workers("test", 1)

    def broken() -> None:
        raise ValueError("no")

    failed = workers.submit(broken)
    after = workers.submit(lambda: 3)
    with pytest.raises(ValueError, match="no"):
        failed.result(timeout=10)
    assert after.result(timeout=10) == 3
    workers.stop(timeout_seconds=10)


def test_two_workers_take_the_two_oldest_jobs() -> None:
    workers = Workers("test", 2)
    both_in = threading.Barrier(2, timeout=10)
    first = workers.submit(both_in.wait)
    second = workers.submit(both_in.wait)  # would never pass if it waited for the first
    assert {first.result(timeout=10), second.result(timeout=10)} == {0, 1}
    workers.stop(timeout_seconds=10)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test-")]


def test_the_end_of_the_program_waits_for_a_job_but_not_for_ever() -> None:
    code = """
import time
from megabatch.comm.worker import Workers
Workers("short", 1).submit(lambda: (time.sleep(0.5), print("done", flush=True)))
Workers("stuck", 2).submit(lambda: time.sleep(600))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n")
