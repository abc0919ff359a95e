"""Turns a signal into a polite request: finish the step, write a checkpoint, stop.

SIGTERM is what schedulers send before they kill, SIGUSR1 what Slurm sends ahead of the time limit, SIGINT is Ctrl-C,
SIGHUP a closed terminal.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import FrameType

__all__ = ["StopRequest", "end_with_parent"]

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


class StopRequest:
    """Whether this process was asked to stop; the workers agree on it at the end of every step."""

    def __init__(self) -> None:
        self.signal_name = ""

    def listen(self) -> StopRequest:
        """Take over the signals; the main thread must call it."""
        for number in _SIGNALS:
            signal.signal(number, self._note)
        return self

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name

    @property
    def wanted(self) -> bool:
        return bool(self.signal_name)


def end_with_parent() -> None:
    """Ask Linux to kill this process when its launcher dies, so that no worker outlives a killed launcher."""
    if not sys.platform.startswith("linux"):
        return
    launcher = os.getppid()
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG in <linux/prctl.h>
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before the request was in place
        os.kill(os.getpid(), signal.SIGKILL)
