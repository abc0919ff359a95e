"""Ends a rank that would wait for ever for another one, and says for which: NCCL itself does neither.

A rank that waits in NCCL hears nothing of an error elsewhere. So a thread of every rank gives a sign of life through
the store. A rank that fails leaves a note there; the others end within seconds, and say who has failed and where. A
rank without a sign of life for `comm.timeout_seconds` is lost: the main rank looks after all, and all after the main
rank.

Signs come from a thread of their own, so a rank may take any time for an evaluation. Silence is counted in one's own
rounds and not by the clock: whoever was paused has not waited. A call of the store does not return when the store's
host falls silent with its connections open, so a second thread counts, which never calls the store. A rank that hangs
goes on giving signs: then NCCL's own time limit ends the others.
"""

from __future__ import annotations

import math
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from megabatch.errors import first_line
from megabatch.machine import host_name
from megabatch.workers.world import World

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

GRACE_SECONDS = 5.0
"""For a rank that fails as well, to say so itself."""

_ROUND_SECONDS = 1.0
_RANKS_PER_SECOND = 500  # the store is asked a few times for each
_LAST_WORDS_SECONDS = 3.0
_NOTE, _NUM_NOTES, _OVER = "note", "notes", "over"


@contextmanager
def heartbeat(
    store: Store,
    world: World,
    timeout_seconds: float,
    *,
    round_seconds: float = _ROUND_SECONDS,
    end: Callable[[str], object] | None = None,
) -> Iterator[None]:
    """Within the block the process ends when another rank of the world has failed or is lost; every rank must enter it.

    store: for this attempt alone. end: is told why, in place of ending the process.
    """
    heart = _Heart(
        store, world, timeout_seconds, max(round_seconds, world.size / _RANKS_PER_SECOND), end or end_process
    )
    heart.start()
    try:
        yield
    except BaseException as error:
        heart.stop(f"{rank_text(world)} failed: {error_text(error)}")
        raise
    heart.stop()


class _Heart:
    def __init__(
        self, store: Store, world: World, timeout_seconds: float, round_seconds: float, end: Callable[[str], object]
    ) -> None:
        # Another connection: the main thread may be waiting in its own.
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._world, self._round_seconds, self._end = world, round_seconds, end
        self._most_silent = max(3, math.ceil(timeout_seconds / round_seconds))  # rounds
        self._watched = [rank for rank in range(world.size) if rank != world.rank] if world.is_main else [0]
        self._last = dict.fromkeys(self._watched, "")
        self._silent = dict.fromkeys(self._watched, 0)  # rounds since the last new sign
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()  # one of each round that the store answered
        self._stopped = threading.Event()
        self._last_words = ""
        self._beating = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._watching = threading.Thread(target=self._watch, name="heartbeat-watch", daemon=True)

    def start(self) -> None:
        self._beating.start()
        self._watching.start()

    def stop(self, last_words: str = "") -> None:
        """This rank is done: nobody waits for a sign of it. last_words: why the others must end."""
        self._last_words = last_words
        self._stopped.set()
        self._answers.put("")  # wakes the watch
        self._watching.join(_LAST_WORDS_SECONDS)
        self._beating.join(_LAST_WORDS_SECONDS)  # the store may be gone

    def _watch(self) -> None:
        """End this rank when a round found a reason, or when no round has come back for too long."""
        reason, unanswered = "", 0
        while not reason and not self._stopped.is_set():
            try:
                reason, unanswered = self._answers.get(timeout=self._round_seconds), 0
            except queue.Empty:
                unanswered += 1
                if unanswered >= self._most_silent and self._last.get(0) != _OVER:
                    reason = f"the store of the run {self._silence_text(unanswered)}; look at rank 0"
        if not self._stopped.wait(GRACE_SECONDS):
            self._end(f"{rank_text(self._world)} ends: {reason}")

    def _beat(self) -> None:
        """All calls of the store; each of them may last for ever."""
        reason, wait_seconds = "", 0.0
        while not reason and not self._stopped.wait(wait_seconds):
            with suppress(RuntimeError):  # the store is gone, or the way to it
                reason = self._round()
                self._answers.put(reason)
            wait_seconds = self._round_seconds
        self._stopped.wait()
        with suppress(RuntimeError):
            if self._last_words:
                self._leave_note(self._last_words)
            self._store.set(_key(self._world.rank), _OVER)

    def _round(self) -> str:
        """Give a sign and look at those of others; returns why this rank must end, if it must."""
        self._store.set(_key(self._world.rank), f"{os.urandom(8).hex()} {rank_text(self._world)}")
        return self._store.get(_NOTE).decode() if self._store.check([_NOTE]) else self._look()

    def _look(self) -> str:
        """Who is lost, if anybody is."""
        there = [rank for rank in self._watched if self._last[rank] or self._store.check([_key(rank)])]
        signs = self._store.multi_get([_key(rank) for rank in there]) if there else []
        newest = {rank: sign.decode() for rank, sign in zip(there, signs, strict=True)}
        reason = ""
        for rank in self._watched:
            is_new = newest.get(rank, "") not in (self._last[rank], "")
            self._silent[rank] = 0 if is_new or self._last[rank] == _OVER else self._silent[rank] + 1
            self._last[rank] = newest.get(rank, "")
            if self._silent[rank] >= self._most_silent and not reason:
                who = self._last[rank].partition(" ")[2] or f"rank {rank}"
                reason = f"{who} {self._silence_text(self._silent[rank])}; look at its log"
        if reason:
            self._leave_note(reason)
        return reason

    def _silence_text(self, rounds: int) -> str:
        return f"has given no sign of life for {rounds * self._round_seconds:g} s"

    def _leave_note(self, text: str) -> None:
        """Tell the others why they must end, unless somebody has already."""
        if self._store.add(_NUM_NOTES, 1) == 1:
            self._store.set(_NOTE, text)


def end_process(reason: str) -> None:
    """Say why, and where NCCL's flight recorder writes, and end the process as a failed one; nothing is waited for."""
    print(f"megabatch: {reason}{recorder_text(os.environ)}", file=sys.stderr, flush=True)
    os._exit(1)


def recorder_text(environ: Mapping[str, str]) -> str:
    """Where torch's flight recorder writes what NCCL was doing, if it was told."""
    # torch 2.13 has new names, and knows the old.
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    sizes = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    path = next((environ[name] for name in names if environ.get(name)), "")
    is_off = next((environ[name] for name in sizes if environ.get(name)), "") == "0"
    return f"; the flight recorder of NCCL writes to {path}<rank> on every host" if path and not is_off else ""


def rank_text(world: World) -> str:
    return f"rank {world.rank} on host {host_name()}"


def error_text(error: BaseException) -> str:
    return first_line(error) if isinstance(error, Exception) else type(error).__name__


def _key(rank: int) -> str:
    return f"sign {rank}"
