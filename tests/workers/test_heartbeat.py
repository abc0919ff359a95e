"""Signs of life: whoever waits for a rank that has failed or is lost ends and says so; a healthy run is left alone.

Ranks are processes that wait in Gloo as they would in NCCL, in a thread that hears nothing of other ranks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from megabatch.workers import heartbeat as heartbeat_module
from megabatch.workers.heartbeat import heartbeat, recorder_text
from megabatch.workers.world import World

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="stops processes by signals")

LIMIT_SECONDS = 4.0
RANK = """
import os, signal, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from megabatch.workers import heartbeat as module
from megabatch.workers.world import World

rank, port, limit, action = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
module.GRACE_SECONDS = 0.3
store = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
dist.init_process_group("gloo", store=PrefixStore("group", store), rank=rank, world_size=3)
world = World(rank, 3, rank, 3, "torchrun", "127.0.0.1", port)
try:
    with module.heartbeat(PrefixStore("heartbeat", store), world, limit, round_seconds=0.2):
        dist.barrier()
        time.sleep(0.5)
        print("ready", flush=True)
        exec(action)
        dist.all_reduce(torch.zeros(1))
except ValueError:
    time.sleep(60)  # aborting never ends: Gloo's connections stay open
os._exit(0)
"""


@contextmanager
def ranks(*actions: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Three ranks that do what is said before they talk with the others, after all have given signs of life."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    environment = {**os.environ, "MEGABATCH_HOST": "node7", "TORCH_FR_DUMP_TEMP_FILE": "/scratch/trace_"}
    processes = []
    for rank, action in enumerate(actions):
        command = [sys.executable, "-c", RANK, str(rank), str(store.port), str(LIMIT_SECONDS), action]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        processes.append(process)
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", process.communicate()[1]
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ends(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, said = process.communicate(timeout=60)
    return process.returncode, said.strip().splitlines()[-1] if said.strip() else ""


def test_a_rank_that_fails_ends_the_others_which_say_who_and_where() -> None:
    began = time.monotonic()
    with ranks("", "", "raise ValueError('a bad image')") as processes:
        for rank in (0, 1):
            code, said = ends(processes[rank])
            assert code == 1
            assert f"rank {rank} on host node7 ends: rank 2 on host node7 failed: ValueError: a bad image" in said
            assert said.endswith("the flight recorder of NCCL writes to /scratch/trace_<rank> on every host")
        assert processes[2].poll() is None
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("stopped", [0, 2])
def test_a_rank_that_is_stopped_is_lost_after_the_time_limit(stopped: int) -> None:
    actions = ["os.kill(os.getpid(), signal.SIGSTOP)" if rank == stopped else "" for rank in range(3)]
    with ranks(*actions) as processes:
        began = time.monotonic()
        for rank in {0, 1, 2} - {stopped}:
            code, said = ends(processes[rank])
            assert code == 1
            assert f"rank {stopped} on host node7 has given no sign of life for" in said
        assert time.monotonic() - began > LIMIT_SECONDS / 2  # it was stopped before `began`


def test_a_store_that_is_gone_is_told_after_the_time_limit() -> None:
    said: list[str] = []
    own = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    client = TCPStore("127.0.0.1", own.port, timeout=timedelta(seconds=5))
    world = World(1, 2, 1, 2, "torchrun", "127.0.0.1", own.port)
    with heartbeat(client, world, 0.3, round_seconds=0.05, end=said.append):
        del own
        deadline = time.monotonic() + 60
        while not said and time.monotonic() < deadline:
            time.sleep(0.05)
    assert "the store of the run has given no sign of life for" in said[0]


STORE = """
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
print(store.port, flush=True)
input()
"""


def test_a_store_whose_host_falls_silent_with_its_connections_open_is_told() -> None:
    """As after a power loss or a cut network: the calls that wait for an answer never return."""
    said: list[str] = []
    host = subprocess.Popen([sys.executable, "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert host.stdout is not None
        port = int(host.stdout.readline())
        client = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
        world = World(1, 2, 1, 2, "torchrun", "127.0.0.1", port)
        with heartbeat(client, world, 1.0, round_seconds=0.05, end=said.append):
            client.get("sign 1")  # it has begun
            host.send_signal(signal.SIGSTOP)
            deadline = time.monotonic() + 30
            while not said and time.monotonic() < deadline:
                time.sleep(0.05)
    finally:
        host.kill()
        host.communicate()
    assert len(said) == 1
    assert "the store of the run has given no sign of life for 1 s; look at rank 0" in said[0]


def test_slow_and_paused_ranks_are_left_alone() -> None:
    """A rank that evaluates for longer than the limit, and then a scheduler that pauses the whole job."""
    with ranks("", "", f"time.sleep({2 * LIMIT_SECONDS})") as processes:
        for process in processes:
            os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2 * LIMIT_SECONDS)
        for process in processes:
            os.kill(process.pid, signal.SIGCONT)
        assert [ends(process) for process in processes] == [(0, "")] * 3


def test_a_rank_that_is_done_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(heartbeat_module, "GRACE_SECONDS", 0.0)
    store = PrefixStore("heartbeat", HashStore())
    first, second = (World(rank, 2, rank, 2, "torchrun", "", 1) for rank in range(2))
    with heartbeat(store, first, 0.2, round_seconds=0.02, end=said.append):
        with heartbeat(store, second, 0.2, round_seconds=0.02, end=said.append):
            time.sleep(0.1)
        time.sleep(1.0)
    assert said == []
    with heartbeat(store, first, 0.2, round_seconds=0.02, end=said.append):
        time.sleep(0.1)
        with pytest.raises(KeyboardInterrupt), heartbeat(store, second, 10.0, end=said.append):
            raise KeyboardInterrupt
        time.sleep(0.5)
    assert "rank 1 on host" in said[0]
    assert "failed: KeyboardInterrupt" in said[0]


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({}, ""),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}, ""),
        ({"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/a/b_"}, "/a/b_<rank>"),
        ({"TORCH_FR_DUMP_TEMP_FILE": "/c_", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/a/b_"}, "/c_<rank>"),
        ({"TORCH_FR_DUMP_TEMP_FILE": "/c_", "TORCH_FR_BUFFER_SIZE": "0"}, ""),
    ],
)
def test_the_flight_recorder_is_named_where_it_is_set(environ: dict[str, str], path: str) -> None:
    assert (path in recorder_text(environ)) if path else recorder_text(environ) == ""
