"""Buffers, tags, hanging up, and the backend's own collectives: padding, operations, bounded waits."""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megabatch.comm.allreduce import AllReducer
from megabatch.comm.grid import ProcessGrid
from megabatch.comm.p2p import (
    ACTION_SHIFT,
    LIBRARY,
    MAX_ACTIONS,
    Link,
    PeerLostError,
    Scratch,
    cached_tag,
    hang_up,
    message_tag,
)
from megabatch.comm.phases import ALGORITHMS
from megabatch.errors import ConfigError
from tests.ranks import run_ranks


def test_scratch_grows_once_and_is_then_reused() -> None:
    scratch = Scratch()
    for _ in range(2):
        scratch.reset(torch.float32)
        first, second = scratch.take(5), scratch.take(7)
    assert first.numel() == 5
    assert second.numel() == 7
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert second.data_ptr() % 64 == first.data_ptr() % 64
    start = first.data_ptr()
    scratch.reset(torch.float64)
    again = scratch.take(3)
    assert again.dtype == torch.float64
    assert again.data_ptr() == start  # another type, the same memory
    larger = scratch.take(1000)
    larger.zero_()
    assert larger.numel() == 1000  # more than there was: allocated aside


def test_scratch_buffers_of_one_call_do_not_overlap() -> None:
    scratch = Scratch()
    for _ in range(2):
        scratch.reset(torch.bfloat16)
        buffers = [scratch.take(numel) for numel in (1, 0, 33, 7, 100)]
        for value, buffer in enumerate(buffers):
            buffer.fill_(value)
        assert all((buffer == value).all() for value, buffer in enumerate(buffers))


def test_tags_tell_calls_actions_and_messages_apart_and_fit_a_signed_int() -> None:
    tags = {
        message_tag(call, message, action)
        for call in range(512)
        for action in (0, 1, MAX_ACTIONS - 1)
        for message in ("1000 float32 torus", "1001 float32 torus")
    }
    assert len(tags) == 512 * 3 * 2
    assert min(tags) >= 0
    assert max(tags) < 2**31 - 1
    cached = {
        cached_tag(call, "1000 float32 torus") + (action << ACTION_SHIFT) for call in range(512) for action in (0, 62)
    }
    assert len(cached) == 512 * 2
    assert not cached & tags
    assert max(cached) < 2**31 - 1
    # An action's number may be added to the tag of action 0, as channels do.
    assert message_tag(5, "m") + (7 << ACTION_SHIFT) == message_tag(5, "m", 7)
    assert message_tag(512 + 3, "m") == message_tag(3, "m")


def _connected(ranks: list[int]) -> dist.ProcessGroup:
    """A group whose ranks have all connected: none is gone while another still makes its connections."""
    group = dist.new_group(ranks)
    assert isinstance(group, dist.ProcessGroup)
    dist.barrier()
    return group


def _hang_up_frees_a_waiting_peer(rank: int) -> tuple[int | None, bool, float]:
    group = _connected([0, 1])
    link = Link(group, (0, 1), rank, timeout_seconds=20)
    handle = link.receive(torch.empty(4), 1 - rank, tag=1)
    start = time.monotonic()
    if rank == 0:
        hang_up(group)
        return None, False, time.monotonic() - start
    with pytest.raises(PeerLostError) as caught:
        link.wait(handle, 0)
    return caught.value.peer, caught.value.timed_out, time.monotonic() - start


def test_hanging_up_frees_a_waiting_peer_at_once() -> None:
    (_, _, own_seconds), (peer, timed_out, peer_seconds) = run_ranks(2, _hang_up_frees_a_waiting_peer)
    assert peer == 0
    assert not timed_out
    assert own_seconds < 15  # the timeout is 20: nobody waited it out
    assert peer_seconds < 15


def _hang_up_beside_a_peer_that_is_gone(rank: int) -> bool | None:
    group = _connected([0, 1, 2])
    link = Link(group, (0, 1, 2), rank, timeout_seconds=20)
    if rank == 2:
        hang_up(group)
    elif rank == 1:
        with pytest.raises(PeerLostError):
            link.wait(link.receive(torch.empty(4), 2, tag=1), 2)
        hang_up(group)
    else:
        with pytest.raises(PeerLostError) as caught:
            link.wait(link.receive(torch.empty(4), 1, tag=1), 1)
        return caught.value.timed_out
    return None


def test_hanging_up_beside_a_peer_that_is_gone_frees_the_others() -> None:
    assert run_ranks(3, _hang_up_beside_a_peer_that_is_gone)[0] is False


def _wait_in_vain(rank: int) -> list[tuple[int | None, bool]]:
    """Nobody sends: both ranks wait the whole time allowed, then find their connections closed."""
    told = []
    link = Link(_connected([0, 1]), (0, 1), rank, timeout_seconds=0.3)
    handle = link.receive(torch.empty(4), 1 - rank, tag=1)
    for attempt in (lambda: link.wait(handle, 1 - rank), lambda: link.receive(torch.empty(4), 1 - rank, tag=2)):
        with pytest.raises(PeerLostError) as caught:
            attempt()
        told.append((caught.value.peer, caught.value.timed_out))
    if rank == 0:
        library = Link(dist.new_group([0], use_local_synchronization=True), (0,), 0, 0.3)
        run = LIBRARY["broadcast"](library, torch.ones(1))
        next(run)
        next(run)
    return told


def test_time_that_ran_out_and_a_closed_connection_are_told_apart() -> None:
    answers = run_ranks(2, _wait_in_vain)
    # Of two ranks whose time runs out together, one may hear first that the other has closed.
    assert any(first == (1 - rank, True) for rank, (first, _) in enumerate(answers))
    for rank, ((peer, _), second) in enumerate(answers):
        assert peer == 1 - rank
        assert second == (1 - rank, False)


def _empty_parts_do_not_travel(rank: int) -> bool:
    link = Link(_connected([0, 1]), (0, 1), rank, timeout_seconds=20)
    link.send(torch.empty(0), 1 - rank, tag=1)
    handle = link.receive(torch.empty(0), 1 - rank, tag=1)
    link.wait(handle, 1 - rank)
    link.flush()
    return handle is None


def test_empty_parts_do_not_travel() -> None:
    assert run_ranks(2, _empty_parts_do_not_travel) == [True, True]


def _reduce_by_library(rank: int) -> list[Any]:
    grid = ProcessGrid.build("2x3", timeout_seconds=20)
    wrong: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "on_gloo", lambda axes: False)
        with pytest.raises(ConfigError, match="two_way_torus keeps all axes busy at once"):
            AllReducer(grid, "two_way_torus")
        for algorithm in [name for name in ALGORITHMS if name != "two_way_torus"]:
            for average in (False, True):
                reducer = AllReducer(grid, algorithm, average=average)
                for numel in (1, 7, 101, 96, 0):  # padded, padded, padded to another length, whole, empty
                    tensor = torch.arange(numel, dtype=torch.float32) * (rank + 1) + rank
                    reducer.run(tensor)
                    exact = (torch.arange(numel, dtype=torch.float64) * 21 + 15) / (6 if average else 1)
                    if not torch.allclose(tensor.double(), exact, rtol=1e-6, atol=0):
                        wrong.append((algorithm, average, numel))
        half = torch.full((5,), 60000.0)
        AllReducer(grid, "torus", average=True, grad_dtype=torch.float16).run(half)
        if not ((half - 60000).abs() <= 100).all():
            wrong.append(("half", half.tolist()))
    return wrong


def test_every_algorithm_of_one_channel_works_on_the_backends_own_collectives() -> None:
    assert run_ranks(6, _reduce_by_library) == [[]] * 6


@pytest.mark.parametrize("on_cuda", [True, False])
def test_on_a_device_collectives_run_on_the_current_stream(monkeypatch: pytest.MonkeyPatch, on_cuda: bool) -> None:
    asked: list[bool] = []

    def all_reduce(part: object, group: object, async_op: bool) -> Any:
        asked.append(async_op)
        return SimpleNamespace(wait=lambda timeout: None) if async_op else None

    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    link: Any = SimpleNamespace(group=None, timeout=timedelta(seconds=1))
    run = LIBRARY["all_reduce"](link, SimpleNamespace(is_cuda=on_cuda))
    next(run)
    next(run)
    assert asked == [not on_cuda]  # a collective that is not asynchronous is enqueued where the caller is
