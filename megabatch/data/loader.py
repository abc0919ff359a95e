"""Feeds one rank its ghost batches, prepared ahead of time by threads or processes.

The loader walks through the same steps as the trainer and loads `step.ghosts`, the ghost batches of this rank. A ghost
batch is cut into pieces, the pieces are prepared side by side straight into the batch's memory, and
ghost batches come out in their order. Every thread does one piece at a time, by itself or by a process of its own.
Decoding releases the interpreter lock, so several threads do keep several cores busy.

The loader's whole state is the stream position at which it started, so a resumed run replays nothing; the stream runs
on over the ends of epochs, so nothing is drained there. Batch size, image size and augmentation may differ from one
step to the next.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megabatch.data.augment import Augmentation
from megabatch.data.batches import Broken, Job, LoaderSettings, fill_training
from megabatch.data.jpeg import Pixels
from megabatch.data.loader_process import LoaderProcess, SharedSlots, views
from megabatch.data.mix import mix
from megabatch.data.randomness import Ints, epoch_order, keyed_uniforms, sample_stream
from megabatch.data.sources import Source
from megabatch.schedule.batch import Step

SMALLEST_PIECE = 8
CLOSE_SECONDS = 10.0


@dataclass(frozen=True)
class Ghost:
    """One ghost batch on its way to the device.

    `number` counts ghost batches over the whole run, whatever the number of ranks. An idle ghost goes through the
    network without weight: it keeps a rank in step when a step has fewer ghost batches than there are ranks.
    """

    images: Tensor  # uint8 [ghost_batch_size, height, width, channels]
    labels: Tensor  # int64 [ghost_batch_size]
    number: int
    idle: bool = False
    mixed: Mixed | None = None


@dataclass(frozen=True)
class Mixed:
    """What the images of a ghost batch took in: the labels of the other images, int64, and the own shares, float32."""

    labels: Tensor
    shares: Tensor


@dataclass(eq=False)
class _Ticket:
    """A ghost batch in the making."""

    number: int
    idle: bool
    pieces_left: int
    images: Pixels
    labels: Ints
    slot: int | None  # of the shared memory in which the arrays lie
    epochs: Ints
    samples: Ints
    broken: list[Broken] = field(default_factory=list)
    error: BaseException | None = None
    ghost: Ghost | None = None
    ready: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def piece_done(self, broken: list[Broken], error: BaseException | None) -> bool:
        """Whether this was the last piece."""
        with self.lock:
            self.broken += broken
            self.error = self.error or error
            self.pieces_left -= 1
            return self.pieces_left == 0


_Piece = tuple[_Ticket, Job, slice]  # the ghost batch, which images to make, and where they go in its arrays


class GhostLoader:
    """Iterates over `(step, this rank's ghost batches)`; close it when done."""

    def __init__(
        self,
        source: Source,
        augmentation: Augmentation,
        image_size: int | Callable[[float], int],
        seed: int,
        steps: Iterator[Step],
        *,
        prefetch_ghosts: int = 4,
        pin_for: torch.device | None = None,
        feeding: LoaderSettings | None = None,
        largest_image_size: int = 0,
    ) -> None:
        """`image_size` is one for all, or a function of the epoch at which a step starts; then say the largest."""
        assert largest_image_size or not callable(image_size)
        self._source, self._augmentation, self._seed, self._steps = source, augmentation, seed, steps
        self._image_size_at = image_size if callable(image_size) else lambda epoch: image_size
        self._largest_image_size = largest_image_size if callable(image_size) else image_size
        self._pin_for, self._feeding = pin_for, feeding or LoaderSettings()
        self._room = threading.Semaphore(prefetch_ghosts)
        self._items: queue.Queue[_Ticket | Step | BaseException | None] = queue.Queue()
        self._pieces: queue.Queue[_Piece | None] = queue.Queue()
        self._closing = threading.Event()
        self._slots: SharedSlots | None = None
        self._sorted_epoch = -1
        self._num_threads = self._feeding.processes or max(1, self._feeding.threads)
        self._threads = [threading.Thread(target=self._plan, name="ghost-plan", daemon=True)]
        for number in range(self._num_threads):
            self._threads.append(threading.Thread(target=self._work, name=f"ghost-piece-{number}", daemon=True))
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
        for _ in step.ghosts:
            ticket = self._get()
            assert isinstance(ticket, _Ticket)
            while not ticket.ready.wait(timeout=1.0):
                assert any(thread.is_alive() for thread in self._threads[1:]), "all threads ended without a word"
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
                for positions in step.ghosts:
                    while not self._room.acquire(timeout=0.2):
                        if self._closing.is_set():
                            return
                    if self._closing.is_set():
                        return
                    self._order(step, positions)
            self._items.put(None)
        except BaseException as error:
            self._items.put(error)

    def _order(self, step: Step, positions: range) -> None:
        """Put a ghost batch in line for the consumer and its pieces in line for the threads."""
        start, count = positions.start, len(positions)
        epochs, samples = sample_stream(self._seed, len(self._source), start, count)
        self._order_ahead(start)
        piece = max(SMALLEST_PIECE, -(-count // self._num_threads))
        parts = [slice(first, min(first + piece, count)) for first in range(0, count, piece)]
        ticket = _Ticket(
            start // count,
            step.is_idle,
            len(parts),
            *self._memory(count, self._image_size_at(step.epoch)),
            epochs,
            samples,
        )
        self._items.put(ticket)
        for part in parts:
            self._pieces.put((ticket, Job(self._augmentation, self._seed, epochs[part], samples[part]), part))

    def _order_ahead(self, start: int) -> None:
        """Sort the next epoch's order while this one is half through: at 1.28 million images it takes a while."""
        epoch, position = divmod(start, len(self._source))
        if position >= len(self._source) // 2 and epoch >= self._sorted_epoch:
            self._sorted_epoch = epoch + 1
            arguments = (self._seed, epoch + 1, len(self._source))
            threading.Thread(target=epoch_order, args=arguments, name="next-epoch-order", daemon=True).start()

    def _memory(self, count: int, size: int) -> tuple[Pixels, Ints, int | None]:
        """Images and labels of a ghost batch to be filled; and its slot, when they lie in shared memory."""
        channels = self._source.channels
        if not self._feeding.processes:
            return np.empty((count, size, size, channels), dtype=np.uint8), np.empty(count, dtype=np.int64), None
        if self._slots is None:  # as large as the largest images need
            self._slots = SharedSlots(count * (self._largest_image_size**2 * channels + 8) + 8)
        slot, memory = self._slots.lease()
        return *views(memory, count, size, channels), slot

    # --- the threads that prepare pieces ---

    def _work(self) -> None:
        process: LoaderProcess | None = None
        source, decoding, tolerant = self._source, self._feeding.decoding, self._feeding.broken.is_tolerant
        try:
            if self._pin_for is not None:
                torch.cuda.set_device(self._pin_for)  # a new thread would open a context on device 0 otherwise
            while (piece := self._pieces.get()) is not None and not self._closing.is_set():
                ticket, job, part = piece
                broken: list[Broken] = []
                error: BaseException | None = None
                try:
                    if ticket.slot is not None:
                        assert self._slots is not None
                        process = process or LoaderProcess(source, decoding, tolerant, self._slots)
                        broken = process.prepare(job, ticket.slot, part, *ticket.images.shape[:2])
                    else:
                        listed = broken if tolerant else None
                        fill_training(source, job, ticket.images[part], ticket.labels[part], decoding, listed)
                except BaseException as raised:
                    error = raised
                if ticket.piece_done(broken, error):
                    self._finish(ticket)
                del piece, ticket
        finally:
            if process is not None:
                process.close()

    def _finish(self, ticket: _Ticket) -> None:
        if ticket.error is None:
            mixed = self._mix(ticket) if self._augmentation.mixes else None
            images, labels = self._tensor(ticket.images), self._tensor(ticket.labels)
            ticket.ghost = Ghost(images, labels, ticket.number, ticket.idle, mixed)
        ticket.ready.set()

    def _mix(self, ticket: _Ticket) -> Mixed:
        """Mix the images of a whole ghost batch: its draws are those of its images, as everywhere."""
        policy = self._augmentation
        draws = keyed_uniforms(self._seed, ticket.epochs, ticket.samples, policy.num_draws)
        shares = mix(ticket.images, policy, draws[:, policy.draws_of("mix")])
        return Mixed(self._tensor(np.roll(ticket.labels, -1)), self._tensor(shares))

    def _tensor(self, values: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(values)
        return tensor if self._pin_for is None else tensor.pin_memory()
