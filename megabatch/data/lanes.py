"""Ways to get a piece of a batch prepared: in this process, or in a process of its own.

A lane does one piece at a time; the loader gives each its own thread. Decoding releases the interpreter lock, so
several lanes in one process do keep several cores busy. A process of its own keeps Python's part of the work away
from the training loop, and a decoder that crashes on an image takes down that process only: the run then ends with
the image's name.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import signal
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from megabatch.data.assemble import Job, fill_training
from megabatch.data.broken import Broken
from megabatch.data.decode import Decoding
from megabatch.data.slots import Slots
from megabatch.data.sources import Source, image_name
from megabatch.errors import DataError, MegabatchError

__all__ = ["Lane", "LaneTask", "OwnProcess", "SameProcess", "read_message", "send_message"]

_LENGTH = struct.Struct("<Q")
NOBODY = -1


@dataclass(frozen=True)
class LaneTask:
    """Images `first` .. `last` of a ghost batch whose arrays lie in a slot of the shared memory, or at hand."""

    job: Job  # of this piece
    ghost_batch_size: int
    first: int
    last: int
    image_size: int
    slot: int | None
    images: NDArray[np.uint8]
    labels: NDArray[np.int64]


class Lane(Protocol):
    def prepare(self, task: LaneTask) -> list[Broken]:
        """Fill the task's part of the arrays; return the broken images met. Raises DataError."""

    def close(self) -> None: ...


class SameProcess:
    """Does the work in the calling thread."""

    def __init__(self, source: Source, decoding: Decoding, tolerant: bool) -> None:
        self._source, self._decoding, self._tolerant = source, decoding, tolerant

    def prepare(self, task: LaneTask) -> list[Broken]:
        broken: list[Broken] = []
        report = broken.append if self._tolerant else None
        part = slice(task.first, task.last)
        fill_training(self._source, task.job, task.images[part], task.labels[part], self._decoding, report)
        return broken

    def close(self) -> None:
        pass


class OwnProcess:
    """Has the work done by a process that ends with this one, however this one ends."""

    def __init__(self, source: Source, decoding: Decoding, tolerant: bool, slots: Slots) -> None:
        self._source = source
        with tempfile.TemporaryFile() as file:
            file.truncate(mmap.PAGESIZE)
            self._at = np.frombuffer(mmap.mmap(file.fileno(), mmap.PAGESIZE), dtype=np.int64)
            self._at_descriptor = os.dup(file.fileno())
        self._at[0] = NOBODY
        command = [sys.executable, "-m", "megabatch.data.child"]
        shared = (slots.descriptor, self._at_descriptor)
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=shared)
        start = (source, decoding, tolerant, slots.slot_bytes, *shared)
        self._send(start)

    def prepare(self, task: LaneTask) -> list[Broken]:
        self._send((task.job, task.slot, task.ghost_batch_size, task.first, task.last, task.image_size))
        answer = self._receive()
        if isinstance(answer, MegabatchError):
            raise answer
        broken: list[Broken] = answer
        return broken

    def close(self) -> None:
        """Ask the process to end by closing its input; end it if it does not."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with contextlib.suppress(OSError):
            self._child.stdin.close()
        try:
            self._child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()
        if self._at_descriptor >= 0:
            os.close(self._at_descriptor)
            self._at_descriptor = -1

    def _send(self, message: Any) -> None:
        assert self._child.stdin is not None
        try:
            send_message(self._child.stdin, message)
        except OSError:
            raise self._death() from None

    def _receive(self) -> Any:
        assert self._child.stdout is not None
        try:
            return read_message(self._child.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            raise self._death() from None

    def _death(self) -> DataError:
        """What became of the process, and which image it had in hand."""
        self.close()
        code = self._child.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        sample = int(self._at[0])
        if sample == NOBODY:
            return DataError(f"a loader process {how} before its first image; see its message above, then --resume")
        name = image_name(self._source, sample)
        return DataError(
            f"a loader process {how} while it had the image {name}; if it happens again remove that image, "
            "otherwise give the machine more memory, then --resume"
        )


def send_message(file: BinaryIO | Any, message: Any) -> None:
    content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    file.write(_LENGTH.pack(len(content)) + content)
    file.flush()


def read_message(file: BinaryIO | Any) -> Any:
    """The next message of the process at the other end of the pipe. Raises EOFError at its end."""
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    content = file.read(length)
    if len(content) < length:
        raise EOFError
    return pickle.loads(content)
