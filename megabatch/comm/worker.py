"""A daemon thread that runs what it is given, one job after another.

Like `concurrent.futures.ThreadPoolExecutor`, which would keep a failing program alive: the interpreter waits
for the executor's threads at exit, and a communication thread may be waiting for a rank that is gone. Here it waits
too, but not for long: a thread caught inside torch's C++ code when the interpreter goes down would abort the process.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["Workers"]

T = TypeVar("T")

EXIT_SECONDS = 2.0
"""How long the end of the program waits for all threads of one `Workers` together."""


class Workers:
    """`count` threads taking jobs in the order submitted: the oldest unfinished job is always in work."""

    def __init__(self, name: str, count: int) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True) for index in range(count)
        ]
        for thread in self._threads:
            thread.start()
        weakref.finalize(self, _end, self._jobs, self._threads)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job; the future carries what it returns or raises."""
        future: Future[T] = Future()
        self._jobs.put((job, future))
        return future

    def stop(self, timeout_seconds: float) -> None:
        """Finish what is queued and end the threads, waiting at most `timeout_seconds` for each."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(timeout_seconds)

    def _run(self) -> None:
        while (work := self._jobs.get()) is not None:
            job, future = work
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
            del work, job, future  # an idle thread must not keep a gradient alive


def _end(
    jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None], threads: list[threading.Thread]
) -> None:
    for _ in threads:
        jobs.put(None)
    until = time.monotonic() + EXIT_SECONDS
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))
