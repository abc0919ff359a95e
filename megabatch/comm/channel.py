"""Runs the phases of one channel on one part of a message: posts every receive first, then phase after phase.

`TaskThreads` are the threads in which several channels, or several buckets, do so at the same time.

A reduce-scatter leaves this rank with its own chunk, on which the next phase works; the matching all-gather
widens again. So the parts of a torus nest like brackets, and one stack tells what every phase works on.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from megabatch.comm.grid import ProcessGrid
from megabatch.comm.p2p import ACTION_SHIFT, LIBRARY, MAX_ACTIONS, Link, PeerLostError, Scratch, own_chunk
from megabatch.comm.phases import Division, Phase
from megabatch.comm.primitives import PRIMITIVES
from megabatch.comm.shared_memory import SHARED, Lane

T = TypeVar("T")
_Jobs = queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]

EXIT_SECONDS = 2.0
"""How long the end of the program waits for the threads of one `TaskThreads`."""


@dataclass(frozen=True, slots=True)
class _Action:
    """One primitive of the channel. An all-reduce by ring is two: a reduce-scatter and an all-gather."""

    name: str
    operation: str
    primitive: Any
    link: Link | Lane
    tag_offset: int
    division: Division


class Channel:
    """The primitives that this rank runs, in order, with their links and buffers. Used by one thread at a time.

    divided_phases: the phases, each with what is divided around it. first_action: number of the channel's first
    primitive within the algorithm; equal on all ranks, as all tags must be. lane: claimed for this channel, to be used
    along axes that share memory.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        divided_phases: Iterable[tuple[Phase, Division]],
        segment_bytes: int,
        *,
        own_primitives: bool,
        first_action: int = 0,
        lane: int | None = None,
    ) -> None:
        self.scratch = Scratch()
        self.segment_bytes = segment_bytes
        self._links: dict[int, Link | Lane] = {}
        self.actions: list[_Action] = []
        number = first_action
        for phase, division in divided_phases:
            own = own_primitives and phase.pattern != "backend"
            operations = _operations(phase, own=own)
            is_leader = not any(grid.coordinates[phase.axis + 1 :])
            if is_leader or not phase.leaders:
                if phase.axis not in self._links:
                    shared = grid.memory.lane(phase.axis, lane, grid.timeout_seconds) if own else None
                    self._links[phase.axis] = shared or grid.link(phase.axis)
                link = self._links[phase.axis]
                own_kind = SHARED if isinstance(link, Lane) else PRIMITIVES
                for index, operation in enumerate(operations):
                    self.actions.append(
                        _Action(
                            name=phase.name(grid.shape.names),
                            operation=operation,
                            primitive=own_kind[operation, phase.pattern] if own else LIBRARY[operation],
                            link=link,
                            tag_offset=(number + index) << ACTION_SHIFT,
                            # An all-reduce in two halves divides between them, where each rank owns one chunk.
                            division=division if index == 0 else Division(),
                        )
                    )
            number += len(operations)
        self.end_action = number
        assert number < MAX_ACTIONS

    @property
    def first_divisor(self) -> float:
        """What the division before the first phase divides by."""
        return self.actions[0].division.before if self.actions else 1

    def run(self, message: torch.Tensor, tag: int, *, divide_first: bool = True, turn: Turn | None = None) -> None:
        """Post and run once: `Passage.run` says what it raises."""
        passage = Passage(self, message, tag)
        passage.post()
        passage.run(divide_first=divide_first, turn=turn)

    def flush(self) -> None:
        """Block until everything sent has left this rank."""
        try:
            for link in self._links.values():
                link.flush()
        except PeerLostError as error:
            error.phase = self.actions[-1].name
            raise


class Turn:
    """Lets channels cross their first axis one after another: side by side they would share it, all reach the second
    axis late and together, and overlap nothing. A channel waits for older ones alone, so never in a circle."""

    __slots__ = ("before", "over")

    def __init__(self, previous: Turn | None) -> None:
        self.before: threading.Event | None = None if previous is None else previous.over
        self.over: threading.Event = threading.Event()


class Passage:
    """The way of one message through a channel, used again and again with new content. One at a time per channel.

    Posting can be done long before running: nothing arrives in `message` before this rank has sent from it.
    """

    def __init__(self, channel: Channel, message: torch.Tensor, tag: int) -> None:
        channel.scratch.reset(message.dtype)
        self._channel = channel
        self._steps: list[tuple[_Action, Generator[None, None, None], torch.Tensor, torch.Tensor]] = []
        part = message
        outer: list[torch.Tensor] = []
        for action in channel.actions:
            if action.operation == "all_gather":
                part = outer.pop()
            run = action.primitive(action.link, part, tag + action.tag_offset, channel.scratch, channel.segment_bytes)
            result = part
            if action.operation == "reduce_scatter":
                result = own_chunk(part, action.link.position, action.link.size)
                outer.append(part)
            self._steps.append((action, run, part, result))
            part = result

    def post(self) -> None:
        """Post the receives of every primitive.

        Raises:
            PeerLostError: the connections are closed already.
        """
        for action, run, _, _ in self._steps:
            _advance(run, action)

    def run(self, *, divide_first: bool = True, turn: Turn | None = None) -> None:
        """Reduce the message in place.

        divide_first: whether the division before the first phase is still to be done. turn: where this channel stands
        among those that begin on the same axis.

        Raises:
            PeerLostError: a peer hung up or did not answer in time.
        """
        if turn is not None and turn.before is not None:
            turn.before.wait()
        try:
            for index, (action, run, part, result) in enumerate(self._steps):
                if action.division.before != 1 and (index > 0 or divide_first):
                    part.div_(action.division.before)
                _advance(run, action)
                if action.division.after != 1:
                    result.div_(action.division.after)
                if turn is not None:
                    turn.over.set()
            self._channel.flush()
        finally:
            if turn is not None:
                turn.over.set()


class TaskThreads:
    """`count` daemon threads taking jobs in the order submitted: the oldest unfinished job is always in work.

    Like `concurrent.futures.ThreadPoolExecutor`, which would keep a failing program alive: the interpreter waits for
    the executor's threads at exit, and a communication thread may be waiting for a rank that is gone. Here it waits
    too, but not for long: a thread caught inside torch's C++ code when the interpreter ends would abort the process.
    """

    def __init__(self, name: str, count: int) -> None:
        self._jobs: _Jobs = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True) for index in range(count)
        ]
        for thread in self._threads:
            thread.start()
        self.count = count
        weakref.finalize(self, _end, self._jobs, self._threads, EXIT_SECONDS)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job; the future carries what it returns or raises."""
        future: Future[T] = Future()
        self._jobs.put((job, future))
        return future

    def stop(self, timeout_seconds: float) -> None:
        """Finish what is queued and end the threads, waiting at most `timeout_seconds`."""
        _end(self._jobs, self._threads, timeout_seconds)

    def _run(self) -> None:
        while (work := self._jobs.get()) is not None:
            job, future = work
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
            del work, job, future  # an idle thread must not keep a gradient alive


def _advance(run: Generator[None, None, None], action: _Action) -> None:
    try:
        next(run)
    except PeerLostError as error:
        error.phase = action.name
        raise


def _operations(phase: Phase, *, own: bool) -> tuple[str, ...]:
    """The primitives of a phase. The backend, where it works, does an all-reduce in one."""
    if own and phase.operation == "all_reduce" and phase.pattern in ("ring", "direct"):
        return ("reduce_scatter", "all_gather")
    return (phase.operation,)


def _end(jobs: _Jobs, threads: list[threading.Thread], timeout_seconds: float) -> None:
    for _ in threads:
        jobs.put(None)
    until = time.monotonic() + timeout_seconds
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))
