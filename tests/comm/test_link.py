"""Buffers, tags, and hanging up."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from megabatch.comm.link import ACTION_SHIFT, MAX_ACTIONS, Link, Scratch, hang_up, kept_tag, message_tag
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
    kept = {
        kept_tag(call, "1000 float32 torus") + (action << ACTION_SHIFT) for call in range(512) for action in (0, 62)
    }
    assert len(kept) == 512 * 2
    assert not kept & tags
    assert max(kept) < 2**31 - 1
    # An action's number may be added to the tag of action 0, as lanes do.
    assert message_tag(5, "m") + (7 << ACTION_SHIFT) == message_tag(5, "m", 7)
    assert message_tag(512 + 3, "m") == message_tag(3, "m")


def _hang_up_frees_a_waiting_peer(rank: int) -> tuple[str, float, int | None]:
    group = dist.new_group([0, 1])
    link = Link(group, (0, 1), rank, timeout_seconds=20)
    handle = link.receive(torch.empty(4), 1 - rank, tag=1)
    start = time.monotonic()
    if rank == 0:
        hang_up(group)
        link.waiting_for = 1
        return "hung up", time.monotonic() - start, link.waiting_for
    try:
        link.wait(handle, 0)
    except RuntimeError as error:
        return str(error), time.monotonic() - start, link.waiting_for
    return "nothing happened", 0.0, None


def test_hanging_up_frees_a_waiting_peer_at_once() -> None:
    (_, own_seconds, _), (message, peer_seconds, waited_for) = run_ranks(2, _hang_up_frees_a_waiting_peer)
    assert "closed" in message
    assert waited_for == 0
    assert own_seconds < 5
    assert peer_seconds < 10  # the timeout is 20


def _empty_parts_do_not_travel(rank: int) -> bool:
    link = Link(dist.new_group([0, 1]), (0, 1), rank, timeout_seconds=20)
    link.send(torch.empty(0), 1 - rank, tag=1)
    handle = link.receive(torch.empty(0), 1 - rank, tag=1)
    link.wait(handle, 1 - rank)
    link.flush()
    return handle is None


def test_empty_parts_do_not_travel() -> None:
    assert run_ranks(2, _empty_parts_do_not_travel) == [True, True]
