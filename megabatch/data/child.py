"""The process behind `OwnProcess`: reads tasks from its input, fills shared memory, answers; ends when the input does.

It imports no torch, so it starts in a moment and stays small.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys

import numpy as np
from numpy.typing import NDArray

from megabatch.data.assemble import fill_training
from megabatch.data.broken import Broken
from megabatch.data.lanes import read_message, send_message
from megabatch.data.slots import Slots
from megabatch.errors import DataError, MegabatchError

__all__ = ["main", "views"]


def views(
    memory: NDArray[np.uint8], ghost_batch_size: int, image_size: int, channels: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The images and, behind them, the labels of a ghost batch in a slot."""
    pixels = ghost_batch_size * image_size * image_size * channels
    start = -(-pixels // 8) * 8
    images = memory[:pixels].reshape(ghost_batch_size, image_size, image_size, channels)
    return images, memory[start : start + 8 * ghost_batch_size].view(np.int64)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not get between the answers
    source, decoding, tolerant, slot_bytes, slots_descriptor, at_descriptor = read_message(requests)
    slots = Slots(slot_bytes, slots_descriptor)
    at = np.frombuffer(mmap.mmap(at_descriptor, mmap.PAGESIZE), dtype=np.int64)

    def watch(sample: int) -> None:
        at[0] = sample

    while True:
        try:
            job, slot, ghost_batch_size, first, last, image_size = read_message(requests)
        except EOFError:
            return
        broken: list[Broken] = []
        images, labels = views(slots.look_at(slot), ghost_batch_size, image_size, source.channels)
        report = broken.append if tolerant else None
        try:
            fill_training(source, job, images[first:last], labels[first:last], decoding, report, watch)
            answer: list[Broken] | MegabatchError = broken
        except MegabatchError as error:
            answer = error
        except Exception as error:  # our own mistake, or a library's: the parent must not wait for an answer
            answer = DataError(f"a loader process failed: {type(error).__name__}: {error}")
        send_message(answers, answer)


if __name__ == "__main__":
    main()
