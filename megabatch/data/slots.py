"""Memory that several processes see: equal slots in one unnamed file, as many as are in use at a time.

The file lies in memory where the system allows it (/dev/shm) and has no name: whatever way the processes end, nothing
stays behind. A slot is a plain array; it is free again when the last array made of it is gone.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections import deque

import numpy as np
from numpy.typing import NDArray

__all__ = ["Slots"]


class Slots:
    """Slots of `slot_bytes` each; the creator leases them, other processes look at them by number."""

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

    @property
    def num_slots(self) -> int:
        return len(self._maps)

    def lease(self) -> tuple[int, NDArray[np.uint8]]:
        """A slot nobody uses, made if need be: its number and its bytes; one thread leases. To free it drop the
        array."""
        try:
            number = self._free.popleft()
        except IndexError:
            number = self._grow()
        # A new array each time: its end, not that of the memory, says that nobody looks at the slot any more.
        array = np.frombuffer(self._maps[number], dtype=np.uint8)
        weakref.finalize(array, self._free.append, number)
        return number, array

    def look_at(self, number: int) -> NDArray[np.uint8]:
        """The bytes of a slot that another process leased."""
        while len(self._maps) <= number:
            self._map(len(self._maps))
        return np.frombuffer(self._maps[number], dtype=np.uint8)

    def close(self) -> None:
        """Give the file back; slots that are still looked at stay until they are not."""
        self._close()

    def _grow(self) -> int:
        number = len(self._maps)
        os.ftruncate(self.descriptor, (number + 1) * self.slot_bytes)
        self._map(number)
        return number

    def _map(self, number: int) -> None:
        self._maps.append(mmap.mmap(self.descriptor, self.slot_bytes, offset=number * self.slot_bytes))
