"""Turns a signal into a polite request: finish the step, write a checkpoint, stop.

SIGTERM is what schedulers send before they kill, SIGUSR1 what Slurm sends ahead of the time limit, SIGINT is Ctrl-C,
SIGHUP a closed terminal.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


def heard_signals(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """The signals that this thread may handle: none unless it is the main one, and no SIGHUP under `nohup`."""
    if threading.current_thread() is not threading.main_thread():
        return []
    under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in numbers if not (under_nohup and number == signal.SIGHUP)]


@contextmanager
def handling(numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Let `handler` have the signals while the block lasts; as far as this thread may, see `heard_signals`."""
    before = {number: signal.signal(number, handler) for number in heard_signals(numbers)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class StopRequest:
    """Whether this process was asked to stop; the ranks share the answer at the end of every step."""

    def __init__(self) -> None:
        self.signal_name = ""

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Take over the signals while the block lasts. Only the main thread may; in another one nothing is heard."""
        with handling(_SIGNALS, self._note):
            yield self

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name

    @property
    def wanted(self) -> bool:
        return bool(self.signal_name)
