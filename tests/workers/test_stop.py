"""Signals become polite requests, and a worker does not outlive the launcher that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from megabatch.workers.stop import StopRequest

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@pytest.fixture
def request_to_stop() -> Iterator[StopRequest]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    with StopRequest().listening() as request:
        yield request
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_nothing_is_interrupted(request_to_stop: StopRequest, number: signal.Signals) -> None:
    assert not request_to_stop.wanted
    os.kill(os.getpid(), number)
    assert request_to_stop.wanted
    assert request_to_stop.signal_name == number.name


def test_without_listening_nothing_is_wanted() -> None:
    assert not StopRequest().wanted
    assert StopRequest().signal_name == ""


CHILD = """
import sys, time
from megabatch.workers.stop import end_with_parent
end_with_parent()
print("ready", flush=True)
time.sleep(60)
"""

LAUNCHER = f"""
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE)
worker.stdout.readline()
print(worker.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a process that its parent died")
def test_a_worker_ends_when_its_launcher_is_killed() -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    try:
        worker = int(launcher.stdout.readline())
        os.kill(worker, 0)  # it is there
        launcher.kill()
        launcher.wait(timeout=10)
        deadline = time.monotonic() + 20
        while is_running(worker) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_running(worker)
    finally:
        launcher.kill()
        launcher.wait(timeout=10)
        launcher.stdout.close()


def is_running(pid: int) -> bool:
    """Whether the process is there and not just waiting to be collected by a new parent."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
