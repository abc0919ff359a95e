"""Messages really sent, counted at the link, against what `phases` charges for them.

Every rank writes down what it sends and what it waits for. Replayed together, each message gets the length of the
chain of messages it had to wait for: the longest chain is the number of dependent steps.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch

from megabatch.comm import primitives
from megabatch.comm.allreduce import AllReducer
from megabatch.comm.grid import ProcessGrid
from megabatch.comm.p2p import ACTION_SHIFT, Link, Scratch, own_chunk
from megabatch.comm.phases import ALGORITHMS, Phase, num_channels, num_steps, phases
from megabatch.comm.primitives import split
from megabatch.comm.shape import GridShape, parse_grid
from tests.ranks import run_ranks

OWN_ALGORITHMS = [name for name in ALGORITHMS if name != "backend"]
NUMEL = 2 * 720  # divides by every number of chunks used below

Event = tuple[str, int, int, int]  # "send" or "wait", other rank, tag, bytes


def _record(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Wrap the three calls of `Link` and return the list they write to."""
    events: list[Event] = []
    send, receive, wait = Link.send, Link.receive, Link.wait

    def counted_send(self: Link, part: torch.Tensor, to: int, tag: int) -> None:
        if part.numel():
            events.append(("send", self.ranks[to], tag, part.numel() * part.element_size()))
        send(self, part, to, tag)

    def counted_receive(self: Link, part: torch.Tensor, source: int, tag: int) -> Any:
        handle = receive(self, part, source, tag)
        return None if handle is None else (handle, tag, part.numel() * part.element_size())

    def counted_wait(self: Link, handle: Any, source: int) -> None:
        if handle is not None:
            wait(self, handle[0], source)
            events.append(("wait", self.ranks[source], handle[1], handle[2]))

    monkeypatch.setattr(Link, "send", counted_send)
    monkeypatch.setattr(Link, "receive", counted_receive)
    monkeypatch.setattr(Link, "wait", counted_wait)
    return events


def _count(rank: int, shape: str) -> dict[tuple[str, int], list[Event]]:
    grid = ProcessGrid.build(shape, timeout_seconds=20, shared_memory=False)
    counted: dict[tuple[str, int], list[Event]] = {}
    for algorithm in OWN_ALGORITHMS:
        for segment_bytes in (2**30, 64):
            with pytest.MonkeyPatch.context() as patch:
                events = _record(patch)
                tensor = torch.full((NUMEL,), float(rank + 1))
                AllReducer(grid, algorithm, segment_bytes=segment_bytes).run(tensor)
                assert (tensor == sum(range(1, grid.world_size + 1))).all(), (algorithm, segment_bytes)
                counted[algorithm, segment_bytes] = list(events)
    return counted


@pytest.mark.parametrize("shape", ["2x2", "2x3"])
def test_counted_steps_and_bytes_are_those_of_the_phases(shape: str) -> None:
    grid = parse_grid(shape)
    by_rank = run_ranks(grid.world_size, _count, shape)
    for algorithm in OWN_ALGORITHMS:
        phase_list = phases(algorithm, grid, NUMEL * 4)
        for segment_bytes in (2**30, 64):
            events = [counted[algorithm, segment_bytes] for counted in by_rank]
            sent = [sum(nbytes for kind, _, _, nbytes in log if kind == "send") for log in events]
            wanted = [float(_sent_share(algorithm, grid, rank) * NUMEL * 4) for rank in range(grid.world_size)]
            assert sent == wanted, (algorithm, segment_bytes)
        whole = [counted[algorithm, 2**30] for counted in by_rank]
        for rank, log in enumerate(whole):
            assert _sends_by_channel(log, phase_list) == _planned_sends(phase_list, grid, rank), (algorithm, rank)
        assert _longest_chain(whole, num_channels(phase_list)) == num_steps(phase_list), algorithm


def _planned_sends(phase_list: Sequence[Phase], grid: GridShape, rank: int) -> list[list[list[tuple[int, int]]]]:
    """For each channel and each round in which `rank` sends: the (target, bytes) of `Phase.transfers`."""
    channels: list[list[list[tuple[int, int]]]] = [[] for _ in range(num_channels(phase_list))]
    for phase in phase_list:
        for one in phase.transfers(grid):
            sends = sorted((b, round(one.share * NUMEL * 4)) for a, b in one.pairs if a == rank)
            channels[phase.channel] += [sends] * (one.count if sends else 0)
    return channels


def _sends_by_channel(log: list[Event], phase_list: Sequence[Phase]) -> list[list[list[tuple[int, int]]]]:
    """The same from what a rank really sent: a round is what it sends without waiting in between."""
    channels = num_channels(phase_list)
    actions = [phase.channel for phase in phase_list for _ in range(_num_primitives(phase))]
    found: list[list[list[tuple[int, int]]]] = [[] for _ in range(channels)]
    last: dict[int, tuple[str, int]] = {}
    for kind, other, tag, num_bytes in log:
        action = tag >> ACTION_SHIFT & 63
        channel = actions[action]
        if kind == "send":
            if last.get(channel) != ("send", action):
                found[channel].append([])
            found[channel][-1] = sorted([*found[channel][-1], (other, num_bytes)])
        last[channel] = (kind, action)
    return found


def _num_primitives(phase: Phase) -> int:
    return 2 if phase.operation == "all_reduce" and phase.pattern in ("ring", "direct") else 1


def _sent_share(algorithm: str, grid: GridShape, rank: int) -> Fraction:
    position = grid.coordinates(rank)
    total = Fraction(0)
    for phase in phases(algorithm, grid, NUMEL * 4):
        takes_part = not phase.leaders or not any(position[phase.axis + 1 :])
        total += phase.sent_share(rank if phase.axis < 0 else position[phase.axis]) if takes_part else 0
    return total


def _longest_chain(logs: list[list[Event]], channels: int) -> int:
    """Replay the logs of all ranks; a send is one longer than all its rank has waited for in the same channel."""
    actions = 1 + max((tag >> ACTION_SHIFT & 63 for log in logs for _, _, tag, _ in log), default=0)
    clocks: dict[tuple[int, int], int] = defaultdict(int)
    under_way: dict[tuple[int, int, int], deque[int]] = defaultdict(deque)
    left = [deque(log) for log in logs]
    while any(left):
        progress = False
        for rank, log in enumerate(left):
            # Channels run in threads of their own, so the order between their entries means nothing.
            for channel in range(channels):
                mine = [event for event in log if (event[2] >> ACTION_SHIFT & 63) * channels // actions == channel]
                if not mine:
                    continue
                kind, other, tag, _ = mine[0]
                if kind == "send":
                    under_way[rank, other, tag].append(clocks[rank, channel] + 1)
                elif under_way[other, rank, tag]:
                    clocks[rank, channel] = max(clocks[rank, channel], under_way[other, rank, tag].popleft())
                else:
                    continue
                log.remove(mine[0])
                progress = True
        assert progress, "somebody waits for what nobody sends"
    assert not any(under_way.values()), "somebody sends what nobody waits for"
    return max(clocks.values(), default=0)


def _halve_and_average(rank: int) -> tuple[int, list[bool]]:
    """Sends left open by the primitive, and averages of long messages, whose sends take their time."""
    grid = ProcessGrid.build("1x3", timeout_seconds=20)
    link = Link(grid.group(1), grid.axis_ranks(1), rank, 20)
    scratch = Scratch()
    scratch.reset(torch.float32)
    run = primitives.halving_all_reduce(link, torch.ones(1_000_003), 1, scratch, 2**30)
    next(run)
    next(run)
    reducer = AllReducer(grid, "halving_doubling", average=True)
    sums = []
    for turn in range(5):
        tensor = torch.arange(1_000_003.0) + 3 * rank + turn
        reducer.run(tensor)
        sums.append(bool((tensor == torch.arange(1_000_003.0) + 3 + turn).all()))
    return len(link._sends), sums


def test_halving_does_not_divide_what_is_still_being_sent() -> None:
    answers = run_ranks(3, _halve_and_average)
    # Rank 1 hands its part over and gets the sum back, so that its one message has arrived, waited for or not.
    assert [open_sends for open_sends, _ in answers] == [0, 1, 0]
    assert [sums for _, sums in answers] == [[True] * 5] * 3


def test_chunks_cover_everything_and_differ_by_one() -> None:
    for numel in (0, 1, 5, 6, 7, 1009):
        tensor = torch.arange(numel)
        for pieces in (1, 2, 3, 6, 8):
            chunks = split(tensor, pieces)
            assert torch.equal(torch.cat(chunks), tensor)
            lengths = [chunk.numel() for chunk in chunks]
            assert max(lengths) - min(lengths) <= 1
            owned = [own_chunk(tensor, position, pieces) for position in range(pieces)]
            assert all(torch.equal(mine, one) for mine, one in zip(owned, chunks, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_terms_held_together_are_summed_in_float32(dtype: torch.dtype) -> None:
    large = 2 / torch.finfo(dtype).eps  # one more is lost in this type, two more are not
    terms = [torch.tensor([large, 1.0], dtype=dtype), *(torch.tensor([1.0, 2.0], dtype=dtype) for _ in range(2))]
    out = terms[1]
    primitives._sum_in_order(out, terms)
    assert out.tolist() == [large + 2, 5.0]
    hop_by_hop = terms[0] + torch.ones(2, dtype=dtype) + torch.ones(2, dtype=dtype)
    assert hop_by_hop[0] == large
