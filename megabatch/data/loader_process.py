"""A process that prepares images for a loader, and the memory that both see.

It keeps Python's part of the work away from the training loop, and a decoder that crashes on an image takes down that
process only: the run then ends with the image's name. It reads tasks from its input, fills shared memory, answers, and
ends when its input does. It imports no torch, so it starts in a moment and stays small.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import weakref
from collections import deque
from typing import Any

import numpy as np

from megabatch.data.batches import Broken, Job, fill_training
from megabatch.data.decode import Decoding
from megabatch.data.jpeg import Pixels
from megabatch.data.randomness import Ints
from megabatch.data.sources import Source
from megabatch.errors import DataError, MegabatchError

NO_SAMPLE = -1


class SharedSlots:
    """Memory that several processes see: equal slots in one unnamed file, as many as are in use at a time.

    The file lies in memory where the system allows it (/dev/shm) and has no name: whatever way the processes end,
    nothing stays behind. The creator leases slots, other processes look at them by number. A slot is a plain array; it
    is free again when the last array made of it is gone.
    """

    def __init__(self, slot_bytes: int, descriptor: int | None = None) -> None:
        self.slot_bytes = -(-slot_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        if descriptor is None:
            folder = "/dev/shm" if os.path.isdir("/dev/shm") and os.access("/dev/shm", os.W_OK) else None
            with tempfile.TemporaryFile(dir=folder) as file:
                descriptor = os.dup(file.fileno())
            os.set_inheritable(descriptor, True)
        self.descriptor = descriptor
        self._maps: list[mmap.mmap] = []
        # Given back without a lock: the end of an array may come at any moment, in any thread.
        self._free: deque[int] = deque()
        self._close = weakref.finalize(self, os.close, descriptor)

    def lease(self) -> tuple[int, Pixels]:
        """The number and the bytes of a slot that nobody uses, made if need be; drop the array to free the slot.

        Only one thread may lease.
        """
        try:
            number = self._free.popleft()
        except IndexError:
            number = len(self._maps)
            os.ftruncate(self.descriptor, (number + 1) * self.slot_bytes)
        # A new array each time: its end, not that of the memory, says that nobody looks at the slot any more.
        array = self.look_at(number)
        weakref.finalize(array, self._free.append, number)
        return number, array

    def look_at(self, number: int) -> Pixels:
        """The bytes of a slot."""
        while len(self._maps) <= number:
            offset = len(self._maps) * self.slot_bytes
            self._maps.append(mmap.mmap(self.descriptor, self.slot_bytes, offset=offset))
        return np.frombuffer(self._maps[number], dtype=np.uint8)

    def close(self) -> None:
        """Give the file back; slots that are still looked at stay until they are not."""
        self._close()


def views(memory: Pixels, ghost_batch_size: int, image_size: int, channels: int) -> tuple[Pixels, Ints]:
    """The images and, behind them, the labels of a ghost batch in a slot."""
    pixels = ghost_batch_size * image_size * image_size * channels
    start = -(-pixels // 8) * 8
    images = memory[:pixels].reshape(ghost_batch_size, image_size, image_size, channels)
    return images, memory[start : start + 8 * ghost_batch_size].view(np.int64)


class LoaderProcess:
    """Has pieces of ghost batches prepared by a process that ends with this one, however this one ends."""

    def __init__(self, source: Source, decoding: Decoding, tolerant: bool, slots: SharedSlots) -> None:
        self._source = source
        with tempfile.TemporaryFile() as file:
            file.truncate(mmap.PAGESIZE)
            self._sample = np.frombuffer(mmap.mmap(file.fileno(), mmap.PAGESIZE), dtype=np.int64)
            self._sample_descriptor = os.dup(file.fileno())
        self._sample[0] = NO_SAMPLE  # the process writes here which sample it has in hand
        command = [sys.executable, "-m", "megabatch.data.loader_process"]
        shared = (slots.descriptor, self._sample_descriptor)
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=shared)
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._requests, self._answers = self._child.stdin, self._child.stdout
        self._send((source, decoding, tolerant, slots.slot_bytes, *shared))

    def prepare(self, job: Job, slot: int, part: slice, ghost_batch_size: int, image_size: int) -> list[Broken]:
        """Have that part of the ghost batch in the slot filled; returns the broken images met. Raises DataError."""
        self._send((job, slot, part, ghost_batch_size, image_size))
        answer = self._receive()
        if isinstance(answer, MegabatchError):
            raise answer
        broken: list[Broken] = answer
        return broken

    def close(self) -> None:
        """Ask the process to end by closing its input; end it if it does not."""
        with contextlib.suppress(OSError):
            self._requests.close()
        try:
            self._child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._answers.close()
        if self._sample_descriptor >= 0:
            os.close(self._sample_descriptor)
            self._sample_descriptor = -1

    def _send(self, message: Any) -> None:
        try:
            pickle.dump(message, self._requests)
            self._requests.flush()
        except OSError:
            raise self._death() from None

    def _receive(self) -> Any:
        try:
            return pickle.load(self._answers)
        except (OSError, EOFError, pickle.UnpicklingError):
            raise self._death() from None

    def _death(self) -> DataError:
        """What became of the process, and which image it had in hand."""
        self.close()
        code = self._child.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        sample = int(self._sample[0])
        if sample == NO_SAMPLE:
            return DataError(f"a loader process {how} before its first image; see its message above, then --resume")
        return DataError(
            f"a loader process {how} while it had the image {self._source.name_of(sample)}; if it happens again "
            "remove that image, otherwise give the machine more memory, then --resume"
        )


def main() -> None:
    """What the process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not get between the answers
    source, decoding, tolerant, slot_bytes, slots_descriptor, sample_descriptor = pickle.load(requests)
    slots = SharedSlots(slot_bytes, slots_descriptor)
    in_hand = np.frombuffer(mmap.mmap(sample_descriptor, mmap.PAGESIZE), dtype=np.int64)

    def watch(sample: int) -> None:
        in_hand[0] = sample

    while True:
        try:
            job, slot, part, ghost_batch_size, image_size = pickle.load(requests)
        except EOFError:
            return
        broken: list[Broken] = []
        images, labels = views(slots.look_at(slot), ghost_batch_size, image_size, source.channels)
        try:
            fill_training(source, job, images[part], labels[part], decoding, broken if tolerant else None, watch)
            answer: list[Broken] | MegabatchError = broken
        except MegabatchError as error:
            answer = error
        except Exception as error:  # our own mistake, or a library's: the parent must not wait for an answer
            answer = DataError(f"a loader process failed: {type(error).__name__}: {error}")
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
