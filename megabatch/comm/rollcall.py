"""When communication breaks: ask every rank what it saw, so that each can name the culprit in one line.

A rank that meets an error knows only its neighbour, and the neighbour may itself be a victim that hung up. So
every failing rank leaves a note in the job's key-value store and reads the notes of the others for a moment.
A rank without a note has died or hangs; notes that describe the same call differently mean that the ranks
disagree.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from torch._C._distributed_c10d import Store

__all__ = ["ALREADY_GIVEN_UP", "Note", "explain", "in_words", "roll_call"]

ALREADY_GIVEN_UP = "this worker had already given up"
"""The cause in a thread whose connections were closed by the failure of another thread of the same rank."""

_POLL_SECONDS = 0.05
_MAX_RANKS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Note:
    """What one rank was doing when communication broke.

    task: such as "bucket 3". call: how many all-reduces this grid had begun before. message: such as "1000
    float32". silent_peer: the rank it waited for, if any. cause: in words.
    """

    rank: int
    task: str
    phase: str
    call: int
    message: str
    silent_peer: int | None
    cause: str


def roll_call(
    store: Store, note: Note, world_size: int, *, settle_seconds: float = 1.0, limit_seconds: float = 5.0
) -> dict[int, Note]:
    """Leave `note` and return the notes of all ranks that left one, by rank, the own one included.

    Listens until no further note has come for `settle_seconds`, at most `limit_seconds`, and reads each note as it
    comes: the rank that holds the store may be the first to leave. A store that no longer answers - its host may be
    what was lost - yields the notes read so far, in the same time.
    """
    notes = {note.rank: note}

    def listen() -> None:
        own = store.add("places", 1)
        store.set(_key(own), json.dumps(asdict(note)))
        store.add("count", 1)
        read = {own}

        def read_new() -> int:
            count = store.add("count", 0)
            if count > len(read):
                for place in range(1, store.add("places", 0) + 1):
                    if place not in read and store.check([_key(place)]):
                        other = Note(**json.loads(store.get(_key(place))))
                        notes.setdefault(other.rank, other)
                        read.add(place)
            return count

        _wait_until_settled(read_new, world_size, settle_seconds, limit_seconds)

    thread = threading.Thread(target=_quietly(listen), name="roll-call", daemon=True)
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
        told = "; ".join(f"{message} on {_ranks(ranks)}" for message, ranks in messages.items())
        return (
            f"{where}: workers disagree about what to reduce ({told}); "
            "build the same model, in the same order and precision, on every worker"
        )
    missing = [rank for rank in range(world_size) if rank not in notes]
    if missing and len(notes) > 1:
        return (
            f"{where}: {own.cause}; not heard from: {_ranks(missing)}; "
            f"look at the log of {_ranks(missing[:1])}, then restart the job"
        )
    if missing:
        return f"{where}: {own.cause}; look at the log of that worker, then restart the job"
    return f"{where}: {own.cause}; all workers live, so raise the timeout if one was merely late, and restart"


def in_words(error: Exception, peer: int | None, timeout_seconds: float) -> str:
    """The backend's complaint about `peer` in a few words."""
    text = str(error)
    who = f"rank {peer}" if peer is not None else "another rank"
    if "pair closure" in text:
        return ALREADY_GIVEN_UP
    if "closed by peer" in text or "reset by peer" in text:
        return f"{who} closed its connection"
    if "timed out" in text.lower():
        return f"{who} did not answer within {timeout_seconds:g} s"
    first_line = text.splitlines()[0] if text else type(error).__name__
    return f"no answer from {who} ({first_line.encode('ascii', 'ignore').decode()})"


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


def _quietly(listen: Callable[[], None]) -> Callable[[], None]:
    """A lost store is no further error: the failure that led here is the one to report."""

    def run() -> None:
        try:
            listen()
        except (RuntimeError, ValueError, TypeError):
            return

    return run


def _key(place: int) -> str:
    """Notes lie in the order in which they came, so that nobody has to ask for those that never will."""
    return f"note {place}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:_MAX_RANKS_SHOWN])
    more = f" and {len(ranks) - _MAX_RANKS_SHOWN} more" if len(ranks) > _MAX_RANKS_SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
