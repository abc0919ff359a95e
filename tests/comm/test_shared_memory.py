"""Reducing through shared memory: the bits of Gloo's primitives, lost and stopped peers, nothing left behind."""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from megabatch.comm import shared_memory
from megabatch.comm.allreduce import AllReducer
from megabatch.comm.grid import ProcessGrid
from megabatch.comm.hook import gradient_hook
from megabatch.comm.p2p import PeerLostError
from megabatch.comm.phases import ALGORITHMS
from megabatch.comm.primitives import PRIMITIVES
from megabatch.comm.shared_memory import LANES, SHARED, share_memory
from megabatch.errors import CommunicationError
from tests.ranks import run_ranks

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
BLOCK = 2**20  # bytes in half a slot
_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x20000


def _data(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Different on every rank and position."""
    generator = torch.Generator().manual_seed(7919 * seed + 1000 * rank + numel)
    if dtype == torch.int32:
        return torch.randint(-(2**28), 2**28, (numel,), generator=generator, dtype=dtype)
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * (rank + 1) + rank).to(dtype)


def _total(world_size: int, numel: int, seed: int = 0) -> torch.Tensor:
    """The sum over ranks of integers, which wraps around nowhere."""
    return torch.stack([_data(rank, numel, torch.int32, seed) for rank in range(world_size)]).sum(dim=0).to(torch.int32)


def test_every_primitive_of_gloo_has_a_twin() -> None:
    assert SHARED.keys() == PRIMITIVES.keys()


def _twins(rank: int, shape: str) -> list[Any]:
    shared = ProcessGrid.build(shape, timeout_seconds=30)
    over_gloo = ProcessGrid.build(shape, timeout_seconds=30, shared_memory=False)
    assert all(axis in shared.memory for axis in shared.shape.axes)
    assert not any(axis in over_gloo.memory for axis in shared.shape.axes)
    wrong: list[Any] = []
    kinds = [(dtype, average) for dtype in FLOATS for average in (False, True)] + [(torch.int32, False)]
    for algorithm, (dtype, average) in itertools.product(ALGORITHMS, kinds):
        reducers = [AllReducer(grid, algorithm, average=average) for grid in (shared, over_gloo)]
        assert reducers[0]._lanes
        for numel in (1, 3, 1009, 100_003):
            mine, gloos = (_data(rank, numel, dtype) for _ in range(2))
            reducers[0].run(mine)
            reducers[1].run(gloos)
            terms = torch.stack([_data(other, numel, dtype).double() for other in range(shared.world_size)])
            total, size = terms.sum(dim=0), terms.abs().sum(dim=0)
            bound = 0 if dtype == torch.int32 else shared.world_size * torch.finfo(dtype).eps * size
            far = ((mine.double() * (shared.world_size if average else 1) - total).abs() > bound).any()
            if far or not torch.equal(mine, gloos):
                wrong.append((shape, algorithm, dtype, average, numel, bool(far)))
        for reducer in reducers:
            reducer.close()
    return wrong


@pytest.mark.parametrize("shape", ["1x3", "2x2", "4x1", "2x3"])
def test_results_are_the_float64_sum_and_have_the_bits_of_gloo(shape: str) -> None:
    rows, columns = (int(part) for part in shape.split("x"))
    assert all(wrong == [] for wrong in run_ranks(rows * columns, _twins, shape))


def _fuzz(rank: int, seed: int) -> list[Any]:
    grid = ProcessGrid.build("1x3", timeout_seconds=30)
    drawn = random.Random(seed)
    reducers = {name: AllReducer(grid, name) for name in ALGORITHMS}
    edges = [(BLOCK // 4 + off) * times for off in (-1, 0, 1) for times in (1, 2, 3)]  # around whole blocks
    wrong = []
    for turn in range(60):
        numel = drawn.choice([drawn.randrange(1, 40), drawn.randrange(1, 900_000), drawn.choice(edges)])
        algorithm = drawn.choice(list(ALGORITHMS))
        tensor = _data(rank, numel, torch.int32, turn)
        reducers[algorithm].run(tensor)
        if not torch.equal(tensor, _total(3, numel, turn)):
            wrong.append((turn, algorithm, numel))
    return wrong


@pytest.mark.parametrize("seed", [1, 2])
def test_any_length_in_any_order(seed: int) -> None:
    assert run_ranks(3, _fuzz, seed) == [[], [], []]


def _buckets(rank: int) -> bool:
    grid = ProcessGrid.build("2x2", timeout_seconds=30)
    hook, _ = gradient_hook(grid, "torus", buckets_in_flight=3)
    right = True
    for turn in range(5):
        sizes = [70_001, 5, 300_007, 1, 12_345, 400_000, 77]
        buckets = [_data(rank, numel, torch.float64, turn) for numel in sizes]
        futures = [hook.reduce_buffer(bucket, index) for index, bucket in enumerate(buckets)]
        for future, numel in zip(futures, sizes, strict=True):
            mean = torch.stack([_data(other, numel, torch.float64, turn) for other in range(4)]).mean(dim=0)
            right &= torch.allclose(future.wait(), mean, rtol=1e-12, atol=1e-12)
    hook.close()
    return right


def test_several_buckets_in_flight_do_not_mix() -> None:
    assert run_ranks(4, _buckets) == [True] * 4


def _end_in_the_middle(rank: int, how: int) -> tuple[str, float]:
    grid = ProcessGrid.build("1x3", timeout_seconds=4 if how == signal.SIGSTOP else 60)
    reducer = AllReducer(grid, "ring")
    reducer.run(torch.ones(10))
    if rank == 1:
        victim = os.getpid()
        command = f"import os, time; time.sleep(0.3); os.kill({victim}, {how})"
        if how == signal.SIGSTOP:
            command += f"; time.sleep(12); os.kill({victim}, {signal.SIGCONT})"
        subprocess.Popen([sys.executable, "-c", command])
    start = time.monotonic()
    try:
        while True:
            reducer.run(torch.ones(3_000_000), task="bucket 0")
    except CommunicationError as error:
        return str(error), time.monotonic() - start


def test_a_rank_that_is_killed_in_the_middle_is_noticed_at_once() -> None:
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(AssertionError) as caught:
        run_ranks(3, _killed)
    told = str(caught.value)
    assert "rank 1: the process died without a word" in told
    assert told.count("not heard from: rank 1;") == 2
    assert "AssertionError: ended late" not in told
    assert set(os.listdir("/dev/shm")) <= before


def _killed(rank: int) -> None:
    message, seconds = _end_in_the_middle(rank, signal.SIGKILL)
    raise AssertionError(message if seconds < 15 else f"ended late: {message}")


def test_a_rank_that_is_stopped_is_given_up_after_the_timeout() -> None:
    answers = run_ranks(3, _end_in_the_middle, int(signal.SIGSTOP), timeout_seconds=60)
    for rank in (0, 2):
        message, seconds = answers[rank]
        assert "not heard from: rank 1;" in message
        assert 3 < seconds < 15
    assert any("rank 1 did not answer within 4 s" in message for message, _ in answers)


def _hang_up_frees(rank: int) -> tuple[float, str]:
    grid = ProcessGrid.build("1x3", timeout_seconds=60)
    lane = grid.memory.lane(1, 5, 60)
    assert lane is not None
    lane.run("all_gather", torch.ones(7), tag=3)
    dist.barrier()
    start = time.monotonic()
    if rank == 2:
        time.sleep(0.5)
        grid.memory.hang_up()
    try:
        lane.run("all_gather", torch.ones(7), tag=4)
    except PeerLostError as lost:
        return time.monotonic() - start, f"{lost} {'was late' if lost.timed_out else 'hung up'}"
    return time.monotonic() - start, "came through"


def test_hanging_up_frees_the_ranks_that_wait() -> None:
    answers = run_ranks(3, _hang_up_frees)
    assert all(seconds < 10 for seconds, _ in answers)
    assert [told for _, told in answers[:2]] == ["rank 2 hung up"] * 2
    assert answers[2][1] in ("rank 0 hung up", "rank 1 hung up")


def _disagree(rank: int) -> str:
    grid = ProcessGrid.build("1x2", timeout_seconds=30)
    reducer = AllReducer(grid, "torus")
    try:
        reducer.run(torch.ones(1000 + 8 * rank), task="bucket 4")
    except CommunicationError as error:
        return str(error)
    return "nothing was noticed"


def test_ranks_that_reduce_different_messages_are_told_so() -> None:
    for told in run_ranks(2, _disagree):
        assert "workers disagree about what to reduce" in told
        assert "bucket 4 of 1000 float32 on rank 0; bucket 4 of 1008 float32 on rank 1" in told


def _raise(*_: object) -> Any:
    raise OSError("seeded")


def _decide(rank: int, case: str) -> bool:
    if case == "hosts":
        os.environ["MEGABATCH_HOST"] = f"host{rank}"
    if case == "one cannot map" and rank == 1:
        shared_memory._mapped = _raise  # type: ignore[assignment]
    if case == "no helper" and rank == 1:
        os.environ["MEGABATCH_NATIVE"] = "0"
    wanted = not (case == "one does not want it" and rank == 1)
    grid = ProcessGrid.build("1x2", timeout_seconds=30, shared_memory=wanted)
    tensor = _data(rank, 1000, torch.int32)
    AllReducer(grid, "torus").run(tensor)
    assert torch.equal(tensor, _total(2, 1000))
    return 1 in grid.memory


@pytest.mark.parametrize("case", ["all fits", "hosts", "one cannot map", "no helper", "one does not want it"])
def test_memory_is_shared_only_where_all_ranks_can(case: str) -> None:
    assert run_ranks(2, _decide, case) == [case == "all fits"] * 2


def _two_networks(rank: int, apart: bool) -> bool:
    group = dist.group.WORLD
    assert group is not None
    dist.barrier()  # connects; sockets stay where they were made
    if apart and rank == 1:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(_CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    return share_memory(group, [0, 1], rank, wanted=True) is not None


@pytest.mark.skipif(os.getuid() != 0, reason="makes a network namespace; needs root")
def test_emulated_hosts_of_one_kernel_do_not_share_memory() -> None:
    assert run_ranks(2, _two_networks, True) == [False, False]
    assert run_ranks(2, _two_networks, False) == [True, True]


def _small_dev_shm(rank: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(_CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", "/dev/shm"], check=True)
    grid = ProcessGrid.build("1x2", timeout_seconds=30)
    tensor = _data(rank, 2_500_000, torch.int32)
    AllReducer(grid, "torus").run(tensor)
    return 1 in grid.memory and torch.equal(tensor, _total(2, 2_500_000))


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small /dev/shm; needs root")
def test_a_small_dev_shm_is_no_limit() -> None:
    assert run_ranks(2, _small_dev_shm) == [True, True]


def _uneven_hosts(rank: int) -> list[bool]:
    os.environ["MEGABATCH_HOST"] = "b" if rank == 3 else "a"
    grid = ProcessGrid.build("2x2", timeout_seconds=30)
    right = []
    for algorithm, numel in itertools.product(ALGORITHMS, (5, 1000, 200_003)):
        tensor = _data(rank, numel, torch.int32)
        AllReducer(grid, algorithm).run(tensor)
        right.append(torch.equal(tensor, _total(4, numel)))
    return [all(right), 1 in grid.memory, 0 in grid.memory]


def test_some_lines_of_an_axis_share_memory_and_others_do_not() -> None:
    shares = [(True, True), (True, False), (False, True), (False, False)]
    assert run_ranks(4, _uneven_hosts) == [[True, *pair] for pair in shares]


def _two_hosts(rank: int) -> list[bool]:
    os.environ["MEGABATCH_HOST"] = f"host{rank // 2}"
    grid = ProcessGrid.build("2x2", timeout_seconds=30)
    tensor = _data(rank, 200_003, torch.int32)
    AllReducer(grid, "torus").run(tensor)
    right = torch.equal(tensor, _total(4, 200_003))
    return [right, 1 in grid.memory, 0 in grid.memory]


def test_rows_inside_hosts_share_memory_and_columns_between_them_do_not() -> None:
    assert run_ranks(4, _two_hosts) == [[True, True, False]] * 4


def _no_helper(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(shared_memory, "build", _raise)
    return "seeded"


def _strict_memory(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(Path, "read_text", lambda path, **_: "2\n" if path.name == "overcommit_memory" else "boot")
    return "vm.overcommit_memory is 2"


def _no_file(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(os, "memfd_create", _raise)
    return "they could not map one memory file"


@pytest.mark.parametrize("break_it", [_no_helper, _strict_memory, _no_file])
def test_why_memory_is_not_shared_is_told_once(
    break_it: Callable[[pytest.MonkeyPatch], str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    dist.init_process_group("gloo", store=FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    shared_memory._loaded.cache_clear()
    try:
        reason = break_it(monkeypatch)
        group = dist.group.WORLD
        assert group is not None
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert share_memory(group, [0], 0, wanted=True) is None
        (record,) = caplog.records
        assert record.message.startswith(f"ranks of one host reduce over Gloo, not through shared memory: {reason}")
        assert "\n" not in record.message
    finally:
        shared_memory._say_once.cache_clear()
        shared_memory._loaded.cache_clear()
        dist.destroy_process_group()


def test_the_file_is_closed_to_other_users_and_has_no_name() -> None:
    before = set(os.listdir("/dev/shm"))
    file = shared_memory._make_file(4, 12345)
    try:
        assert os.fstat(file).st_mode & 0o777 == 0o600
        assert set(os.listdir("/dev/shm")) <= before
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(file, 0)  # sealed: cutting it short would kill whoever has mapped it
        shared_memory._mapped(os.getpid(), file, 12345)
        with pytest.raises(OSError, match="another mark"):
            shared_memory._mapped(os.getpid(), file, 12346)
        with pytest.raises(OSError, match="another file"):
            shared_memory._mapped(os.getpid(), 0, 12345)
        if os.getuid() == 0:
            place = f"/proc/{os.getpid()}/fd/{file}"
            attempt = f"import os; os.setgid(65534); os.setuid(65534); os.open('{place}', os.O_RDONLY)"
            done = subprocess.run([sys.executable, "-c", attempt], capture_output=True, text=True, check=False)
            assert "PermissionError" in done.stderr
    finally:
        os.close(file)


def _files_and_maps() -> tuple[int, int]:
    maps = Path("/proc/self/maps").read_text(encoding="ascii").count("memfd:megabatch")
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return maps, sum("memfd:megabatch" in link or "pidfd" in link for link in links)


def _come_and_go(rank: int) -> list[tuple[int, int]]:
    counts = []
    for _ in range(3):
        with ProcessGrid.build("1x2", timeout_seconds=30) as grid:
            AllReducer(grid, "torus").run(torch.ones(1000))
            during = _files_and_maps()
        counts += [during, _files_and_maps()]
    return counts


def test_a_closed_grid_gives_everything_back() -> None:
    for counts in run_ranks(2, _come_and_go):
        assert counts == [(1, 2), (0, 0)] * 3  # a map with its file, and what tells of the peer's end


def _lanes(rank: int) -> list[Any]:
    grid = ProcessGrid.build("1x2", timeout_seconds=30)
    first = AllReducer(grid, "torus")
    many = [AllReducer(grid, "torus") for _ in range(LANES)]
    taken = (first._lanes, many[-1]._lanes)  # the last one found none left and uses Gloo
    totals = []
    for reducer in (first, many[0], many[-1]):
        tensor = torch.full((5,), float(rank + 1))
        reducer.run(tensor)
        totals.append(tensor.tolist())
    first.close()
    return [*taken, totals, AllReducer(grid, "torus")._lanes]


def test_lanes_are_given_back_and_their_end_is_not_the_end() -> None:
    assert run_ranks(2, _lanes) == [[[0], [], [[3.0] * 5] * 3, [0]]] * 2


def test_the_struct_is_that_of_the_helper() -> None:
    assert ctypes.sizeof(shared_memory._LaneStruct) == 6 * 8 + 2 * 8 + 3 * 4 + 4
