"""When communication breaks: the consistency check that prevents it, and the failure report that explains it.

Ranks that built different models reduce buckets of different sizes. Left alone, Gloo would end the process and NCCL
would hang. `check_consistency` asks once per new kind of message, at the price of two small hops: each rank turns what
it is about to reduce into a number d; the greatest d and the greatest -d over the grid are opposite exactly when all
are equal.

A rank that meets an error knows only its neighbour, and the neighbour may itself be a victim that hung up. So every
failing rank leaves a note in the job's key-value store and reads the notes of the others for a moment. A rank without
a note has died or hangs; notes that describe the same call differently mean that the ranks disagree.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from megabatch.comm.grid import ProcessGrid
from megabatch.comm.p2p import MAX_ACTIONS, PeerLostError, Scratch, message_tag
from megabatch.comm.primitives import exchange_maximum
from megabatch.comm.shape import ranks_text
from megabatch.errors import CommunicationError, DisagreementError

_CHECK = "consistency check"
_ECHO_SECONDS = 0.2
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Note:
    """What one rank was doing when communication broke.

    task: such as "bucket 3". call: how many all-reduces this grid had begun before. message: such as "1000
    float32". cause: in words.
    """

    rank: int
    task: str
    phase: str
    call: int
    message: str
    cause: str


def is_lost_contact(error: BaseException) -> bool:
    """Whether an error means that another worker cannot be reached, or that a device failed: worth another try."""
    # Gloo has no error class of its own; its messages begin with the path of its source file.
    known = isinstance(error, (CommunicationError, dist.DistError, torch.AcceleratorError, TimeoutError))
    return known or (isinstance(error, RuntimeError) and "gloo" in str(error).split("]")[0])


def check_consistency(
    grid: ProcessGrid, *, call: int, task: str, message: str, digest_of: str, device: torch.device
) -> None:
    """Return when every rank passed the same `digest_of` for this call.

    task and message are for people: "bucket 3", "1000 float32".

    Raises:
        DisagreementError: saying who has what, when one differs.
        CommunicationError: a rank does not answer, or has seen the difference already and left.
    """
    digest = int.from_bytes(hashlib.blake2b(digest_of.encode(), digest_size=7).digest())
    extremes = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
    if device.type == "cpu" and grid.on_gloo(grid.shape.axes):
        try:
            # The maximum along each axis in turn, with all receives posted first.
            scratch, tag = Scratch(), message_tag(call, "", action=MAX_ACTIONS - 1)
            scratch.reset(extremes.dtype)
            runs = [exchange_maximum(grid.link(axis), extremes, tag, scratch, 1) for axis in grid.shape.axes]
            for run in (*runs, *runs):
                next(run)
        except PeerLostError as lost:
            raise report_lost_peer(grid, lost, task=task, phase=_CHECK, call=call, message=message) from lost
    else:
        for axis in grid.shape.axes:
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=grid.group(axis))
    greatest, opposite = extremes.tolist()
    if greatest != -opposite:
        told = fail(grid, Note(grid.rank, task, _CHECK, call, message, f"workers disagree about {message}"))
        raise DisagreementError(str(told))


def report_lost_peer(
    grid: ProcessGrid, lost: PeerLostError, *, task: str, phase: str, call: int, message: str
) -> CommunicationError:
    """Give the grid up because of a lost peer; the error to raise says who is missing, on every rank."""
    who = f"rank {lost.peer}" if lost.peer is not None else "another rank"
    cause = (
        f"{who} did not answer within {grid.timeout_seconds:g} s"
        if lost.timed_out
        else f"the connection to {who} broke"
    )
    note = Note(grid.rank, task, phase, call, message, cause)
    # A broken connection may be an echo: one thread that gives up breaks those of the other threads of its rank.
    return fail(grid, note, may_be_echo=not lost.timed_out)


def fail(grid: ProcessGrid, note: Note, *, may_be_echo: bool = False) -> CommunicationError:
    """Give the grid up: free the ranks that wait for this one, hear what they saw, return the error.

    may_be_echo: let another thread of this rank, which may know the cause, report first.
    """
    grid.hang_up()
    if may_be_echo and grid.asks_who_is_missing:
        time.sleep(_ECHO_SECONDS)
    with grid.failing:
        if grid.failure is None:
            notes = {note.rank: note}
            if grid.store is not None and grid.asks_who_is_missing:
                notes = collect_notes(grid.store, note, grid.world_size)
            grid.failure = explain(note, notes, grid.world_size)
        return CommunicationError(grid.failure)


def collect_notes(
    store: Store, note: Note, world_size: int, *, settle_seconds: float = 1.0, limit_seconds: float = 5.0
) -> dict[int, Note]:
    """Leave `note` and return the notes of all ranks that left one, by rank, the own one included.

    Listens until no further note has come for `settle_seconds`, at most `limit_seconds`, and reads each note as it
    comes: the rank that holds the store may be the first to leave. A store that no longer answers - its host may be
    what was lost - yields the notes read so far, in the same time.
    """
    notes = {note.rank: note}

    read: set[int] = set()

    def read_new() -> int:
        count = store.add("count", 0)
        if count > len(read):
            for place in range(1, store.add("places", 0) + 1):
                if place not in read and store.check([_key(place)]):
                    other = Note(**json.loads(store.get(_key(place))))
                    notes.setdefault(other.rank, other)
                    read.add(place)
        return count

    def listen() -> None:
        # A lost store is no further error: the failure that led here is the one to report.
        with contextlib.suppress(RuntimeError, ValueError, TypeError):
            own = store.add("places", 1)
            read.add(own)
            store.set(_key(own), json.dumps(asdict(note)))
            store.add("count", 1)
            _wait_until_settled(read_new, world_size, settle_seconds, limit_seconds)

    thread = threading.Thread(target=listen, name="failure-report", daemon=True)
    thread.start()
    thread.join(limit_seconds + settle_seconds)
    return dict(notes)


def explain(own: Note, notes: Mapping[int, Note], world_size: int) -> str:
    """One line for the user: what this rank met, who is missing or who disagrees, what to do."""
    where = f"rank {own.rank}, {own.task}, {own.phase}"
    messages: dict[str, list[int]] = {}
    for rank in sorted(notes):
        if notes[rank].call == own.call:
            messages.setdefault(f"{notes[rank].task} of {notes[rank].message}", []).append(rank)
    if len(messages) > 1:
        listed = "; ".join(f"{message} on {ranks_text(ranks)}" for message, ranks in messages.items())
        return (
            f"{where}: workers disagree about what to reduce ({listed}); "
            "build the same model, in the same order and precision, on every worker"
        )
    missing = [rank for rank in range(world_size) if rank not in notes]
    if missing and len(notes) > 1:
        return (
            f"{where}: {own.cause}; not heard from: {ranks_text(missing)}; "
            f"look at the log of {ranks_text(missing[:1])}, then restart the job"
        )
    if missing:
        return f"{where}: {own.cause}; look at the log of that worker, then restart the job"
    return f"{where}: {own.cause}; all workers live, so raise the timeout if one was merely late, and restart"


def _wait_until_settled(count: Callable[[], int], complete: int, settle_seconds: float, limit_seconds: float) -> None:
    start = changed = time.monotonic()
    seen = -1
    while (now := time.monotonic()) - start < limit_seconds and now - changed < settle_seconds:
        current = count()
        if current >= complete:
            return
        if current != seen:
            seen, changed = current, now
        time.sleep(_POLL_SECONDS)


def _key(place: int) -> str:
    """Notes lie in the order in which they came, so that nobody has to ask for those that never will."""
    return f"note {place}"
