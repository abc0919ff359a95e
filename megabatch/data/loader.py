"""Feeds one worker its ghost batches, prepared ahead of time.

The loader walks through the same list of updates as the engine, takes from each the ghost batches dealt to this worker
and prepares their pictures in a background thread. Its whole state is the stream position at which it started, so a
resumed run replays nothing.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megabatch.data.assemble import assemble_training
from megabatch.data.augment import Augmentation
from megabatch.data.order import stream
from megabatch.data.sources import Source
from megabatch.schedule.batch import Update, deal

__all__ = ["Ghost", "GhostLoader"]


@dataclass(frozen=True)
class Ghost:
    """One ghost batch on its way to the device.

    `number` counts ghost batches over the whole run, whatever the number of workers. An idle ghost goes through the
    network without weight: it keeps a worker in step when an update has fewer ghost batches than there are workers.
    """

    pictures: Tensor  # uint8 [ghost_batch, height, width, channels]
    labels: Tensor  # int64 [ghost_batch]
    number: int
    idle: bool = False


class GhostLoader:
    """Iterates over `(update, this worker's ghost batches)`; close it when done."""

    def __init__(
        self,
        source: Source,
        augmentation: Augmentation,
        image_size: int,
        seed: int,
        updates: Iterator[Update],
        *,
        worker: int,
        num_workers: int,
        prefetch_ghosts: int = 4,
        pin_for: torch.device | None = None,
    ) -> None:
        self._source = source
        self._augmentation = augmentation
        self._image_size = image_size
        self._seed = seed
        self._updates = updates
        self._worker = worker
        self._num_workers = num_workers
        self._pin_for = pin_for
        self._queue: queue.Queue[Ghost | Update | BaseException | None]
        self._queue = queue.Queue(maxsize=prefetch_ghosts)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._produce, name="ghost-loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[Update, Iterator[Ghost]]]:
        while (item := self._get()) is not None:
            assert isinstance(item, Update)
            yield item, self._ghosts_of(item)

    def close(self) -> None:
        """Stop preparing; returns within seconds."""
        self._closing.set()
        self._thread.join(timeout=10)

    def _ghosts_of(self, update: Update) -> Iterator[Ghost]:
        for _ in range(max(1, len(deal(update.num_ghosts, self._num_workers, self._worker)))):
            item = self._get()
            assert isinstance(item, Ghost)
            yield item

    def _get(self) -> object:
        while True:
            was_alive = self._thread.is_alive()  # asked before the wait: it may put its last item and end during it
            try:
                item = self._queue.get(timeout=1.0)
            except queue.Empty:
                assert was_alive, "the loader's thread ended without a word"
                continue
            if isinstance(item, BaseException):
                raise item
            return item

    def _put(self, item: Ghost | Update | BaseException | None) -> bool:
        while not self._closing.is_set():
            try:
                self._queue.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False

    def _produce(self) -> None:
        try:
            if self._pin_for is not None:
                torch.cuda.set_device(self._pin_for)  # a new thread would open a context on device 0 otherwise
            for update in self._updates:
                if not self._put(update):
                    return
                mine = deal(update.num_ghosts, self._num_workers, self._worker)
                for index in mine or [0]:
                    if not self._put(self._ghost(update, index, idle=not mine)):
                        return
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _ghost(self, update: Update, index: int, idle: bool) -> Ghost:
        start = update.start_samples + index * update.ghost_batch
        epochs, samples = stream(self._seed, len(self._source), start, update.ghost_batch)
        pictures, labels = assemble_training(
            self._source, self._augmentation, self._image_size, self._seed, epochs, samples
        )
        ghost = Ghost(torch.from_numpy(pictures), torch.from_numpy(labels), start // update.ghost_batch, idle)
        if self._pin_for is not None:
            return Ghost(ghost.pictures.pin_memory(), ghost.labels.pin_memory(), ghost.number, idle)
        return ghost
