"""Feeds one worker its ghost batches, prepared ahead of time by several lanes.

The loader walks through the same list of steps as the engine and takes from each the ghost batches dealt to this
worker. A ghost batch is cut into pieces, the pieces are prepared side by side straight into the batch's memory, and
ghost batches come out in their order. The loader's whole state is the stream position at which it started, so a resumed
run replays nothing; the stream runs on over the ends of epochs, so nothing is drained there. Batch size, image size
and augmentation may differ from one step to the next.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megabatch.data.assemble import Job
from megabatch.data.augment import Augmentation
from megabatch.data.broken import Broken
from megabatch.data.child import views
from megabatch.data.feeding import Feeding
from megabatch.data.lanes import Lane, LaneTask, OwnProcess, SameProcess
from megabatch.data.randomness import epoch_order, stream
from megabatch.data.slots import Slots
from megabatch.data.sources import Source
from megabatch.schedule.batch import Step, shard_range

__all__ = ["Ghost", "GhostLoader"]

SMALLEST_PIECE = 8
CLOSE_SECONDS = 10.0


@dataclass(frozen=True)
class Ghost:
    """One ghost batch on its way to the device.

    `number` counts ghost batches over the whole run, whatever the number of workers. An idle ghost goes through the
    network without weight: it keeps a worker in step when a step has fewer ghost batches than there are workers.
    """

    images: Tensor  # uint8 [ghost_batch_size, height, width, channels]
    labels: Tensor  # int64 [ghost_batch_size]
    number: int
    idle: bool = False


class _Ticket:
    """A ghost batch in the making."""

    def __init__(
        self, number: int, idle: bool, images: NDArray[np.uint8], labels: NDArray[np.int64], pieces: int
    ) -> None:
        self.number, self.idle, self.images, self.labels = number, idle, images, labels
        self.broken: list[Broken] = []
        self.error: BaseException | None = None
        self.ghost: Ghost | None = None
        self.ready = threading.Event()
        self._left, self._lock = pieces, threading.Lock()

    def piece_done(self, broken: list[Broken], error: BaseException | None) -> bool:
        """Whether this was the last piece."""
        with self._lock:
            self.broken += broken
            self.error = self.error or error
            self._left -= 1
            return self._left == 0


class GhostLoader:
    """Iterates over `(step, this worker's ghost batches)`; close it when done."""

    def __init__(
        self,
        source: Source,
        augmentation: Augmentation,
        image_size: int | Callable[[float], int],
        seed: int,
        steps: Iterator[Step],
        *,
        rank: int,
        world_size: int,
        prefetch_ghosts: int = 4,
        pin_for: torch.device | None = None,
        feeding: Feeding | None = None,
        largest_image_size: int = 0,
    ) -> None:
        """`image_size` is one for all, or a function of the epoch at which a step starts; then say the largest."""
        assert largest_image_size or not callable(image_size)
        self._source, self._augmentation, self._seed, self._steps = source, augmentation, seed, steps
        self._image_size_at = image_size if callable(image_size) else lambda epoch: image_size
        self._largest_image_size = largest_image_size if callable(image_size) else image_size
        self._rank, self._world_size, self._pin_for = rank, world_size, pin_for
        self._feeding = feeding or Feeding()
        self._room = threading.Semaphore(prefetch_ghosts)
        self._items: queue.Queue[_Ticket | Step | BaseException | None] = queue.Queue()
        self._pieces: queue.Queue[tuple[_Ticket, LaneTask] | None] = queue.Queue()
        self._closing = threading.Event()
        self._slots: Slots | None = None
        self._sorted_epoch = -1
        self._num_lanes = self._feeding.processes or max(1, self._feeding.threads)
        self._threads = [threading.Thread(target=self._plan, name="ghost-plan", daemon=True)]
        for number in range(self._num_lanes):
            self._threads.append(threading.Thread(target=self._work, name=f"ghost-lane-{number}", daemon=True))
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> Iterator[tuple[Step, Iterator[Ghost]]]:
        while (item := self._get()) is not None:
            assert isinstance(item, Step)
            yield item, self._ghosts_of(item)

    def close(self) -> None:
        """Stop preparing; returns within seconds."""
        self._closing.set()
        for _ in self._threads:
            self._pieces.put(None)
        for thread in self._threads:
            thread.join(timeout=CLOSE_SECONDS)
        if self._slots is not None:
            self._slots.close()

    # --- the consumer's side ---

    def _ghosts_of(self, step: Step) -> Iterator[Ghost]:
        for _ in range(max(1, len(shard_range(step.num_ghosts, self._world_size, self._rank)))):
            ticket = self._get()
            assert isinstance(ticket, _Ticket)
            while not ticket.ready.wait(timeout=1.0):
                assert any(thread.is_alive() for thread in self._threads[1:]), "the lanes ended without a word"
            self._room.release()
            if ticket.error is not None:
                raise ticket.error
            self._feeding.broken.note(len(ticket.labels), ticket.broken)
            assert ticket.ghost is not None
            ghost = ticket.ghost
            del ticket  # or the memory would be held until the next one
            yield ghost

    def _get(self) -> _Ticket | Step | None:
        while True:
            was_alive = self._threads[0].is_alive()  # asked before the wait: it may put its last item and end during it
            try:
                item = self._items.get(timeout=1.0)
            except queue.Empty:
                assert was_alive, "the loader's thread ended without a word"
                continue
            if isinstance(item, BaseException):
                raise item
            return item

    # --- the planning thread ---

    def _plan(self) -> None:
        try:
            for step in self._steps:
                self._items.put(step)
                mine = shard_range(step.num_ghosts, self._world_size, self._rank)
                for index in mine or [0]:
                    while not self._room.acquire(timeout=0.2):
                        if self._closing.is_set():
                            return
                    if self._closing.is_set():
                        return
                    self._order(step, index, idle=not mine)
            self._items.put(None)
        except BaseException as error:
            self._items.put(error)

    def _order(self, step: Step, index: int, idle: bool) -> None:
        """Put a ghost batch in line for the consumer and its pieces in line for the lanes."""
        size, count = self._image_size_at(step.start_epoch), step.ghost_batch_size
        start = step.start_samples + index * count
        epochs, samples = stream(self._seed, len(self._source), start, count)
        self._order_ahead(start)
        slot, images, labels = self._memory(count, size)
        piece = max(SMALLEST_PIECE, -(-count // self._num_lanes))
        bounds = range(0, count, piece)
        ticket = _Ticket(start // count, idle, images, labels, len(bounds))
        self._items.put(ticket)
        for first in bounds:
            last = min(first + piece, count)
            job = Job(self._augmentation, self._seed, epochs[first:last], samples[first:last])
            self._pieces.put((ticket, LaneTask(job, count, first, last, size, slot, images, labels)))

    def _order_ahead(self, start: int) -> None:
        """Sort the next epoch's order while this one is half through: at 1.28 million images it takes a while."""
        epoch, position = divmod(start, len(self._source))
        if position >= len(self._source) // 2 and epoch >= self._sorted_epoch:
            self._sorted_epoch = epoch + 1
            arguments = (self._seed, epoch + 1, len(self._source))
            threading.Thread(target=epoch_order, args=arguments, name="next-epoch-order", daemon=True).start()

    def _memory(self, count: int, size: int) -> tuple[int | None, NDArray[np.uint8], NDArray[np.int64]]:
        channels = self._source.channels
        if not self._feeding.processes:
            return None, np.empty((count, size, size, channels), dtype=np.uint8), np.empty(count, dtype=np.int64)
        slot, memory = self._shared(count).lease()
        return slot, *views(memory, count, size, channels)

    def _shared(self, count: int) -> Slots:
        """The shared memory; its slots are as large as the largest images need."""
        if self._slots is None:
            bytes_of_image = self._largest_image_size**2 * self._source.channels
            self._slots = Slots(count * (bytes_of_image + 8) + 8)
        return self._slots

    # --- the lanes' threads ---

    def _work(self) -> None:
        lane: Lane | None = None
        try:
            if self._pin_for is not None:
                torch.cuda.set_device(self._pin_for)  # a new thread would open a context on device 0 otherwise
            while (item := self._pieces.get()) is not None and not self._closing.is_set():
                ticket, task = item
                broken: list[Broken] = []
                error: BaseException | None = None
                try:
                    lane = lane or self._lane()
                    broken = lane.prepare(task)
                except BaseException as raised:
                    error = raised
                if ticket.piece_done(broken, error):
                    self._finish(ticket)
                del item, ticket, task
        finally:
            if lane is not None:
                lane.close()

    def _lane(self) -> Lane:
        feeding = self._feeding
        tolerant = feeding.broken.max_share > 0
        if not feeding.processes:
            return SameProcess(self._source, feeding.decoding, tolerant)
        assert self._slots is not None
        return OwnProcess(self._source, feeding.decoding, tolerant, self._slots)

    def _finish(self, ticket: _Ticket) -> None:
        if ticket.error is None:
            images, labels = torch.from_numpy(ticket.images), torch.from_numpy(ticket.labels)
            if self._pin_for is not None:
                images, labels = images.pin_memory(), labels.pin_memory()
            ticket.ghost = Ghost(images, labels, ticket.number, ticket.idle)
        ticket.ready.set()
