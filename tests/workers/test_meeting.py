"""Meeting the others, or being told who is missing; who listens where; one number for every attempt."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from megabatch.bench import allreduce, doctor, self_test, step
from megabatch.bench.allreduce import BenchRequest
from megabatch.bench.self_test import SelfTestRequest
from megabatch.bench.step import StepBenchRequest
from megabatch.comm import device
from megabatch.errors import LaunchError
from megabatch.recipes import load_config
from megabatch.train import components, entry
from megabatch.train.request import TrainRequest
from megabatch.use import evaluate
from megabatch.workers import meeting
from megabatch.workers import world as world_module
from megabatch.workers.error_file import ERROR_FILE_VARIABLE
from megabatch.workers.meeting import join, leave, listen_at
from megabatch.workers.token import TOKEN_VARIABLE
from megabatch.workers.world import ALONE, World
from tests.ranks import run_ranks


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize(
    ("backend", "ended_well", "expected"),
    [
        ("nccl", True, "destroyed"),
        ("nccl", False, "aborted"),
        ("gloo", True, "destroyed"),
        ("gloo", False, "destroyed"),
    ],
)
def test_after_an_error_nobody_waits_for_a_device(
    monkeypatch: pytest.MonkeyPatch, backend: str, ended_well: bool, expected: str
) -> None:
    done: list[str] = []
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("destroyed"))
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: done.append("aborted"))
    leave(ended_well)
    assert done == [expected]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("hangs", [True, False])
@pytest.mark.parametrize("is_launched", [True, False])
def test_an_error_on_nccl_is_told_before_the_abort_which_may_take_no_time(
    tmp_path: Path, size: int, hangs: bool, is_launched: bool
) -> None:
    code = f"""
import os, time
import torch
import torch.distributed as dist
from megabatch.comm import device
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
from megabatch.errors import ConfigError
from megabatch.workers import meeting
from megabatch.workers.local import run_as_worker
from megabatch.workers.world import ALONE, World

device.check_devices = lambda *_: None
meeting._agree_on_attempt = lambda *_: 0
dist.init_process_group = lambda *_, **__: None
dist.get_backend = lambda: "nccl"
dist.distributed_c10d._abort_process_group = lambda: time.sleep({60 if hangs else 0})
meeting._ABORT_SECONDS = {0.2 if hangs else 60}
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
world = ALONE if {size} == 1 else World(0, 2, 0, 2, "torchrun", "127.0.0.1", store.port, store_is_hosted=True)

def work():
    with meeting.join(world, "nccl", 10.0, torch.device("cuda", 0)):
        raise ConfigError("a bad image")

try:
    run_as_worker(work, world, os.environ)
except ConfigError:
    os._exit(2)
"""
    environment = {**os.environ, "MEGABATCH_HOST": "node7"}
    environment.pop(ERROR_FILE_VARIABLE, None)
    if is_launched:
        environment[ERROR_FILE_VARIABLE] = str(tmp_path / "error")
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == (1 if hangs else 2), done.stderr
    # In a world of one whoever catches the error tells it, unless nobody comes to that.
    is_said = size > 1 or hangs
    assert done.stderr.strip() == ("megabatch: rank 0 on host node7 ends: ConfigError: a bad image" if is_said else "")
    if is_launched:
        assert (tmp_path / "error").read_text() == "a bad image"


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_signs_of_life_are_for_nccl(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    agent = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))
    limits: list[float] = []
    beating: list[object] = []

    @contextmanager
    def heartbeat(_store: Store, world: World, timeout_seconds: float) -> Iterator[None]:
        beating.append((world.rank, timeout_seconds))
        yield
        beating.append("over")

    def init_process_group(*_: object, timeout: timedelta, **__: object) -> None:
        limits.append(timeout.total_seconds())

    monkeypatch.setattr(meeting, "heartbeat", heartbeat)
    monkeypatch.setattr(meeting, "_agree_on_attempt", lambda *_: 0)
    monkeypatch.setattr(meeting, "leave", lambda *_: beating.append("left"))
    monkeypatch.setattr(device, "check_devices", lambda *_: None)
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    world = World(1, 2, 1, 2, "torchrun", "127.0.0.1", agent.port, store_is_hosted=True)
    with join(world, backend, 60.0, torch.device("cuda", 0)):
        pass
    # NCCL ends the process without a name: signs of life must be missed before that.
    assert (beating, limits) == {
        "nccl": ([(1, 60.0), "over", "left"], [96.0]),
        "gloo": (["left"], [60.0]),
    }[backend]


def lonely(_rank: int, ports: list[int]) -> list[tuple[str, float]]:
    """Rank 1 finds nobody at the meeting point; rank 0 opens it and nobody comes; somebody else holds the port."""
    dist.destroy_process_group()
    found = []
    with socket.socket() as occupant:
        occupant.bind(("127.0.0.1", ports[2]))
        occupant.listen()
        for rank, port in ((1, ports[0]), (0, ports[1]), (0, ports[2])):
            world = World(rank, 2, rank, 2, "torchrun", "127.0.0.1", port)
            began = time.monotonic()
            try:
                with join(world, "gloo", 1.0):
                    found.append(("joined", 0.0))
            except LaunchError as error:
                found.append((str(error), time.monotonic() - began))
            assert not dist.is_initialized()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)  # the helper leaves it at the end
    return found


def test_a_missing_peer_is_one_line_with_the_address_after_the_time_limit() -> None:
    ports = [free_port() for _ in range(3)]
    found = run_ranks(1, lonely, ports)[0]
    for (said, seconds), rank, port in zip(found, (1, 0, 0), ports, strict=True):
        assert f"rank {rank} of 2 could not join the others at 127.0.0.1:{port} within 1 s" in said
        assert "\n" not in said
        assert seconds < 30


def leave_the_helpers_group() -> None:
    dist.barrier()  # who left at once would cut off one that still connects
    dist.destroy_process_group()


def meet(rank: int, port: int, attempt: int, counted: list[int]) -> float:
    leave_the_helpers_group()
    if rank == 0:
        time.sleep(0.5)  # rank 1 is there first: only what an earlier attempt has left could mislead it
    world = World(rank, 2, rank, 2, "torchrun", "127.0.0.1", port, attempt=counted[rank], store_is_hosted=True)
    limit = timedelta(seconds=30)
    with join(world, "gloo", 30.0) as meeting:
        assert meeting.world.attempt == attempt
        total = torch.tensor([rank + 1.0 + 10 * attempt])
        dist.all_reduce(total)
        meeting.store.set(f"seen-{attempt}-{rank}", "yes")
        meeting.store.wait([f"seen-{attempt}-{1 - rank}"], limit)
    assert not dist.is_initialized()
    last = PrefixStore(f"end-{attempt}", TCPStore("127.0.0.1", port, timeout=limit))
    dist.init_process_group("gloo", store=last, rank=rank, world_size=2, timeout=limit)  # the helper leaves it
    return total.item()


def test_workers_meet_again_after_a_restart_with_the_same_store() -> None:
    """As under torchrun: one store outlives the workers, who come again as new processes.

    Each host counts only the restarts that its own workers caused: the counts differ, and may stay the same.
    """
    agent = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))
    for attempt, counted in enumerate([[0, 0], [1, 0], [1, 1], [1, 2]]):
        assert run_ranks(2, meet, agent.port, attempt, counted) == [3.0 + 20 * attempt] * 2


def test_a_store_that_is_younger_than_the_run_does_not_begin_at_the_first_attempt() -> None:
    agent = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))
    assert run_ranks(2, meet, agent.port, 3, [3, 1]) == [63.0] * 2
    assert run_ranks(2, meet, agent.port, 4, [3, 2]) == [83.0] * 2


def meet_with(rank: int, port: int, tokens: list[str], seconds: float) -> str:
    leave_the_helpers_group()
    os.environ[TOKEN_VARIABLE] = tokens[rank]
    said = "met"
    try:
        with join(World(rank, 2, rank, 2, "torchrun", "127.0.0.1", port, store_is_hosted=True), "gloo", seconds):
            dist.barrier()  # who left at once would cut off one that still connects
    except LaunchError as error:
        said = str(error)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)  # the helper leaves it at the end
    return said


def test_only_workers_with_the_same_token_meet() -> None:
    agent = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))
    assert run_ranks(2, meet_with, agent.port, ["a" * 16] * 2, 60.0) == ["met"] * 2
    for said in run_ranks(2, meet_with, agent.port, ["a" * 16, "b" * 16], 2.0):
        assert "could not join the others" in said
        assert "has the same MEGABATCH_TOKEN" in said
        assert "a" * 16 not in said  # fewer may stand in the digest that is named
        assert "b" * 16 not in said


def listening() -> set[str]:
    connections = psutil.Process().net_connections("inet")
    return {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}


def look_around(rank: int, port: int) -> set[str]:
    leave_the_helpers_group()
    with join(World(rank, 2, rank, 2, "srun", "localhost", port), "gloo", 30.0):
        dist.barrier()
        found = listening()
        dist.barrier()
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)  # the helper leaves it at the end
    return found


def test_workers_of_one_host_listen_at_the_loopback_address_alone() -> None:
    for found in run_ranks(2, look_around, free_port()):
        assert found
        assert found <= {"127.0.0.1", "::1"}


def test_a_store_listens_at_the_address_of_its_host_where_that_can_be() -> None:
    descriptor = listen_at("127.0.0.1", 0, local=True)
    assert descriptor is not None
    with socket.socket(fileno=descriptor) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        with pytest.raises(OSError, match="in use"):
            listen_at("127.0.0.1", listener.getsockname()[1], local=True)
    # The name stands for the loopback address here, and workers on other hosts could not reach it there.
    assert listen_at("127.0.0.1", 0, local=False) is None
    # The address belongs to another machine, as that of a gateway does.
    assert listen_at("192.0.2.1", 0, local=False) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted in /proc")
def test_leaving_ends_the_threads_of_the_group() -> None:
    """Left running, they abort a process that ends while one of them lets go of a tensor."""
    code = f"""
import os
import torch
import torch.distributed as dist
from megabatch.workers.meeting import join
from megabatch.workers.world import World

def threads():
    names = [open(f"/proc/self/task/{{task}}/comm").read().strip() for task in os.listdir("/proc/self/task")]
    return sorted(name for name in names if "gloo" in name)

with join(World(0, 1, 0, 1, "torchrun", "127.0.0.1", {free_port()}), "gloo", 30.0):
    network = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    network(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(network.parameters(), 0.1).step()
    import torch.distributed.nn.functional
    dist.all_gather_object([None], "all")
    assert threads(), "gloo's threads are not found by their names"
    circle = [network]
    circle.append(circle)
    del network, circle
assert threads() == [], threads()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def join_by_train(world: World, _folder: Path) -> None:
    entry._train_in(world, TrainRequest(load_config("demo")))


def join_by_self_test(world: World, folder: Path) -> None:
    self_test._test_in(world, SelfTestRequest(output=folder / "page.html"))


def join_by_killed_rank(world: World, _folder: Path) -> None:
    self_test._reduce_until_killed(world)


def join_by_doctor(_world: World, _folder: Path) -> None:
    doctor.examine_joined_world({})


def join_by_allreduce(world: World, _folder: Path) -> None:
    allreduce._bench_in(world, BenchRequest(), [4096], ["ring"])


def join_by_step(world: World, _folder: Path) -> None:
    step._measure_in(world, StepBenchRequest(load_config("demo"), (2, 4)), lambda *_: None)


def join_by_evaluate(_world: World, folder: Path) -> None:
    with evaluate._open(folder, None):
        pass


@pytest.mark.parametrize(
    "command",
    [
        join_by_train,
        join_by_self_test,
        join_by_killed_rank,
        join_by_doctor,
        join_by_allreduce,
        join_by_step,
        join_by_evaluate,
    ],
)
def test_nccl_is_given_the_one_device_that_is_shown(
    command: Callable[[World, Path], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`srun --gpus-per-task=1`: number 3 of its host sees a device 0 alone. A device 3 would be out of range."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))
    world = World(3, 4, 3, 4, "srun", "127.0.0.1", agent.port, store_is_hosted=True)
    given: list[object] = []

    def init_process_group(backend: str, *, device_id: torch.device, **_: object) -> None:
        given.append((backend, device_id))
        raise RuntimeError("far enough")

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(world_module, "num_accelerators", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(components, "choose_kernels", lambda *_: None)
    monkeypatch.setattr(meeting, "_agree_on_attempt", lambda *_: 0)
    monkeypatch.setattr(device, "check_devices", lambda *_: None)
    for module in (doctor, evaluate):
        monkeypatch.setattr(module, "read_world", lambda *_, **__: world)
    monkeypatch.setattr(evaluate, "config_of_run", lambda _: load_config("demo"))
    with pytest.raises(LaunchError, match="far enough"):
        command(world, tmp_path)
    assert given == [("nccl", torch.device("cuda", 0))]


def test_joining_with_nccl_looks_at_the_devices_first(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(device, "check_devices", lambda *_: done.append("devices"))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: done.append("nccl"))
    monkeypatch.setattr(meeting, "leave", lambda *_: None)
    with join(ALONE, "nccl", 10.0, torch.device("cuda", 0)):
        assert done == ["devices", "nccl"]
