"""ProcessGrid on real ranks and, for its size, on torch's fake process group; the consistency check in threads."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from megabatch.comm.grid import Layout, ProcessGrid, _axis_group, check_grid_consistency, default_grid
from megabatch.comm.hook import gradient_hook
from megabatch.comm.p2p import uses_gloo
from megabatch.comm.phases import WORLD
from megabatch.comm.select import all_reduce
from megabatch.comm.shape import GridShape, parse_grid
from megabatch.errors import CommunicationError, GridError, LaunchError, MegabatchError
from megabatch.machine import host_name
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


def _held() -> tuple[int, int, int]:
    """Process groups, threads (those of C++ too) and sockets of this process."""
    gc.collect()
    files = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            files.append(os.readlink(f"/proc/self/fd/{number}"))
    sockets = sum(name.startswith("socket:") for name in files)
    return len(dist.distributed_c10d._world.pg_map), len(os.listdir("/proc/self/task")), sockets


def _make_and_close(rank: int, shape: str, algorithm: str) -> tuple[list[tuple[int, int, int]], list[str]]:
    """What is held after each of 20 grids with a hook was closed, and what the closed ones say."""
    held, refused = [], []
    for _ in range(20):
        with ProcessGrid.build(shape, timeout_seconds=20) as grid:
            state, _hook = gradient_hook(grid, algorithm)
            with state:
                buffers = [torch.ones(numel) for numel in (100, 200_000, 3_000_000)]
                for index, future in enumerate([state.reduce_buffer(buffer, 0) for buffer in buffers]):
                    assert torch.equal(future.wait(), torch.ones_like(buffers[index]))
            all_reduce(torch.ones(100), grid, "ring")  # makes a group of the whole world, and caches a reducer
        state.close()
        grid.close()
        for use in (partial(state.reduce_buffer, torch.ones(1), 3), partial(all_reduce, torch.ones(1), grid)):
            try:
                use()
            except CommunicationError as error:
                refused.append(str(error))
        held.append(_held())
    told = torch.ones(1)
    dist.all_reduce(told)  # the default group is not the grid's to destroy
    assert told == dist.get_world_size()
    return held, refused[:2]


@pytest.mark.parametrize(("world_size", "shape", "algorithm"), [(2, "1x2", "torus"), (4, "2x2", "two_way_torus")])
def test_closed_grids_and_hooks_hold_nothing(world_size: int, shape: str, algorithm: str) -> None:
    for held, refused in run_ranks(world_size, _make_and_close, shape, algorithm):
        for start, end in zip(held[1], held[-1], strict=True):  # the first round may load what stays loaded
            assert end <= start, held
        assert refused == [
            "bucket 3 comes after the hook was closed; make another hook for it",
            f"grid {shape} is closed; build another one",
        ]


def _close_after_torch(rank: int) -> None:
    grid = ProcessGrid.build("1x2", timeout_seconds=20)
    state, _ = gradient_hook(grid)
    state.reduce_buffer(torch.ones(1), 0).wait()
    dist.barrier()
    dist.destroy_process_group()
    state.close()
    grid.close()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)  # what `run_ranks` ends


def test_closing_after_torch_ended_its_groups_does_no_harm() -> None:
    run_ranks(2, _close_after_torch)


def test_the_private_function_of_torch_that_is_replaced_is_there_in_the_versions_allowed() -> None:
    """`group_named` replaces `_process_group_name`: a torch that may not have it must not be installed unseen."""
    parameters = inspect.signature(dist.distributed_c10d._process_group_name).parameters
    assert list(parameters) == ["ranks", "use_hashed_name"]
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (torch_range,) = [line for line in project["dependencies"] if line.startswith("torch>")]
    assert torch_range == "torch>=2.13,<2.14"


def _of_meshes(rank: int) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    line = init_device_mesh("cpu", (4,))
    for name, one in (("2x2", mesh), ("4", line)):
        grid = ProcessGrid.build(one, timeout_seconds=20)
        told = torch.arange(5.0) + rank
        all_reduce(told, grid, "torus")
        all_reduce(told, grid, "ring", average=True)
        facts[name] = (grid.shape.text, grid.shape.names, grid.hosts != (), told.tolist())
        facts[f"{name} group"] = grid.group(len(grid.shape.sizes) - 1) is one.get_group(one.ndim - 1)
        grid.close()
    told = torch.tensor([float(rank)])
    dist.all_reduce(told, group=mesh.get_group(0))  # closing a grid leaves the mesh its groups
    facts["after"] = float(told)
    try:
        ProcessGrid.build(DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]])), timeout_seconds=20)
    except GridError as error:
        facts["refused"] = str(error)
    return facts


def test_a_device_mesh_is_a_grid() -> None:
    for rank, facts in enumerate(run_ranks(4, _of_meshes)):
        total = [4.0 * place + 6 for place in range(5)]
        assert facts["2x2"] == ("2x2", ("replica", "shard"), True, total)
        assert facts["4"] == ("4", ("row",), True, total)
        assert facts["2x2 group"]
        assert facts["4 group"]
        assert facts["after"] == (2.0 if rank % 2 == 0 else 4.0)
        assert facts["refused"] == (
            "the mesh holds ranks 0, 2, 1, 3; give one of all ranks of the world, in order, row by row"
        )


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
                "grid shapes differ between workers (3x2 on rank 0; 2x3 on ranks 1 to 5); "
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
    grid = ProcessGrid.build("64x64", check_consistency=False)
    assert grid.coordinates == (63, 63)
    assert grid.axis_ranks(1) == tuple(range(4032, 4096))
    assert grid.axis_ranks(0) == tuple(range(63, 4096, 64))
    assert grid.group(0).size() == grid.group(1).size() == 64
    # No judgement of speed, only that nothing here takes a step per pair of ranks.
    assert time.monotonic() - start < 30
    with pytest.raises(GridError, match="give one or leave check_consistency on"):
        ProcessGrid.build(check_consistency=False)


def test_groups_that_cannot_connect_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_route(*args: object, **options: object) -> None:
        raise RuntimeError("connect: No route to host\nstack")

    monkeypatch.setattr(dist, "new_group", no_route)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    with pytest.raises(LaunchError) as caught:
        _axis_group(GridShape((2, 64)), 0, 1, 5.0, "build")
    assert str(caught.value) == (
        "the row of ranks 0 to 63 could not connect within 5 s (connect: No route to host); "
        "look at their logs and at the network between them"
    )


def _ask(
    hosts: str, shapes: Sequence[str], absent: int | None = None, devices: Sequence[str] = ()
) -> list[Layout | MegabatchError]:
    store = HashStore()

    def rank_asks(rank: int) -> Layout | MegabatchError:
        try:
            wanted = parse_grid(shapes[rank]) if shapes[rank] else None
            device = devices[rank] if devices else ""
            return check_grid_consistency(store, rank, len(hosts), wanted, hosts[rank], 1.0, device)
        except MegabatchError as error:
            return error

    with ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(rank_asks, [rank for rank in range(len(hosts)) if rank != absent]))


def test_a_given_shape_is_kept_and_hosts_are_known() -> None:
    answers = _ask("aabb", ["4x1"] * 4)
    assert answers == [Layout(GridShape((4, 1)), ("a", "a", "b", "b"), "as given")] * 4


def test_without_a_shape_hosts_become_rows() -> None:
    assert _ask("aaabbb", [""] * 6)[3] == Layout(GridShape((2, 3)), tuple("aaabbb"), "one host per row")


def _default(rank: int, hosts: str) -> tuple[str, str]:
    os.environ["MEGABATCH_HOST"] = hosts[rank]
    with ProcessGrid.build(timeout_seconds=20) as grid:
        return default_grid(20.0).text, grid.shape.text


@pytest.mark.parametrize(
    ("hosts", "text"), [("aabb", "2x2"), ("aaaabb", "3x2"), ("aaaaaa", "2x3"), ("abcd", "2x2"), ("aab", "1x3")]
)
def test_without_a_shape_all_ranks_and_users_take_the_same(hosts: str, text: str) -> None:
    assert run_ranks(len(hosts), _default, hosts) == [(text, text)] * len(hosts)


def test_different_shapes_end_everywhere_with_one_reason() -> None:
    errors = _ask("aabb", ["2x2", "2x2", "4x1", "2x2"])
    assert all(isinstance(error, GridError) for error in errors)
    assert {str(error) for error in errors} == {
        "grid shapes differ between workers (2x2 on ranks 0, 1, 3; 4x1 on rank 2); give every worker the same shape"
    }


def test_a_rank_that_does_not_come_is_named_by_all_others() -> None:
    errors = _ask("aabb", ["2x2"] * 4, absent=2)
    assert len(errors) == 3
    assert all(isinstance(error, LaunchError) for error in errors)
    assert {str(error) for error in errors} == {"no grid: rank 2 did not come within 1 s; look at the log of rank 2"}


def test_two_ranks_of_a_host_cannot_have_one_device() -> None:
    errors = _ask("aabb", [""] * 4, devices=["GPU-1", "GPU-2", "GPU-1", "GPU-1"])
    assert all(isinstance(error, LaunchError) for error in errors)
    assert {str(error) for error in errors} == {
        "ranks 2, 3 on host b have the same device (GPU-1); start one worker per device, or show each worker its own"
    }
    assert isinstance(_ask("aabb", [""] * 4, devices=["GPU-1", "GPU-2"] * 2)[0], Layout)


def test_a_missing_main_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megabatch.comm.grid.MAIN_RANK_GRACE_SECONDS", 0.2)
    errors = _ask("ab", ["1x2"] * 2, absent=0)
    assert [str(error) for error in errors] == [
        "the main rank did not say within 1 s how the grid lies; look at the log of rank 0"
    ]


def test_host_name_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGABATCH_HOST", "node7")
    assert host_name() == "node7"
    monkeypatch.delenv("MEGABATCH_HOST")
    assert host_name()
