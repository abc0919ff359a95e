"""The loader: the same ghost batches bit for bit on any number of workers and from any point of the run."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megabatch.data.assemble import assemble_training
from megabatch.data.augment import Augmentation
from megabatch.data.loader import Ghost, GhostLoader
from megabatch.data.order import stream
from megabatch.data.sources import PictureArray, Source
from megabatch.errors import DataError
from megabatch.schedule.batch import Update, iterate_updates, parse_stages

GHOST, NUM_PICTURES, TOTAL, SEED, SIZE = 4, 30, 100, 11, 8
STAGES = parse_stages("0:4 0.5:12 2:40")  # one, three and ten ghosts: fewer, as many and more than workers
AUGMENTATION = Augmentation(crop="pad", padding=1, flip=True)


def source() -> PictureArray:
    pixels = np.random.default_rng(0).integers(0, 256, (NUM_PICTURES, SIZE, SIZE, 3), dtype=np.uint8)
    return PictureArray("test", pixels, np.arange(NUM_PICTURES) % 10)


def updates(start_samples: int = 0, start_index: int = 0) -> Iterator[Update]:
    return iterate_updates(STAGES.at, GHOST, NUM_PICTURES, TOTAL, start_samples=start_samples, start_index=start_index)


def loader(
    worker: int = 0,
    num_workers: int = 1,
    *,
    of: Source | None = None,
    over: Iterator[Update] | None = None,
    ahead: int = 2,
) -> GhostLoader:
    return GhostLoader(
        of or source(),
        AUGMENTATION,
        SIZE,
        SEED,
        over or updates(),
        worker=worker,
        num_workers=num_workers,
        prefetch_ghosts=ahead,
    )


def read_all(one: GhostLoader) -> list[tuple[Update, list[Ghost]]]:
    try:
        return [(update, list(ghosts)) for update, ghosts in one]
    finally:
        one.close()


def same(one: Ghost, other: Ghost) -> bool:
    return (
        one.number == other.number
        and torch.equal(one.pictures, other.pictures)
        and torch.equal(one.labels, other.labels)
    )


def test_one_worker_gets_the_pictures_of_the_stream() -> None:
    got = read_all(loader())
    assert [update for update, _ in got] == list(updates())
    ghosts = [ghost for _, of_update in got for ghost in of_update]
    assert [ghost.number for ghost in ghosts] == list(range(TOTAL // GHOST))
    for ghost in ghosts:
        epochs, samples = stream(SEED, NUM_PICTURES, ghost.number * GHOST, GHOST)
        pictures, labels = assemble_training(source(), AUGMENTATION, SIZE, SEED, epochs, samples)
        assert torch.equal(ghost.pictures, torch.from_numpy(pictures))
        assert torch.equal(ghost.labels, torch.from_numpy(labels))
        assert (ghost.pictures.dtype, ghost.pictures.shape) == (torch.uint8, (GHOST, SIZE, SIZE, 3))
        assert (ghost.labels.dtype, ghost.labels.shape) == (torch.int64, (GHOST,))
        assert not ghost.idle


@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_workers_together_get_what_one_worker_gets(num_workers: int) -> None:
    alone = read_all(loader())
    together = [read_all(loader(worker, num_workers)) for worker in range(num_workers)]
    idle = 0
    for number, (update, expected) in enumerate(alone):
        assert all(of_worker[number][0] == update for of_worker in together)
        dealt = [ghost for of_worker in together for ghost in of_worker[number][1]]
        working = [ghost for ghost in dealt if not ghost.idle]
        assert len(working) == len(expected)
        assert all(map(same, working, expected))
        # A worker without work still has one pass to make, or the others would wait for its gradients.
        assert all(of_worker[number][1] for of_worker in together)
        for ghost in dealt:
            idle += ghost.idle
            assert not ghost.idle or same(ghost, expected[0])
    assert idle > 0


def test_from_the_middle_the_tail_comes() -> None:
    whole = read_all(loader(1, 2))
    for at in (1, 3, len(whole) - 1):
        update = whole[at][0]
        tail = read_all(loader(1, 2, over=updates(update.start_samples, update.index)))
        assert [u for u, _ in tail] == [u for u, _ in whole[at:]]
        for (_, ghosts), (_, expected) in zip(tail, whole[at:], strict=True):
            assert [ghost.idle for ghost in ghosts] == [ghost.idle for ghost in expected]
            assert all(map(same, ghosts, expected))


class Breaking(PictureArray):
    """Raises at the n-th ghost; `hold` makes every read wait."""

    def __init__(self, after: int = 10**9, hold: threading.Event | None = None) -> None:
        whole = source()
        super().__init__("breaking", whole.pictures, whole.labels)
        self.after, self.hold, self.num_reads = after, hold, 0
        # Another size than asked for makes the loader read picture by picture.
        self.pictures = self.pictures[:, :-1]

    def read(self, index: int) -> NDArray[np.uint8]:
        self.num_reads += 1
        if self.hold is not None:
            self.hold.wait(timeout=30)
        if self.num_reads > self.after:
            raise DataError(f"picture {index} cannot be decoded; remove it")
        return super().read(index)


def test_an_unreadable_picture_reaches_the_consumer_after_the_good_ghosts() -> None:
    one = loader(of=Breaking(after=3 * GHOST + 1))
    good: list[int] = []

    def consume() -> None:
        for _, ghosts in one:
            good.extend(ghost.number for ghost in ghosts)

    with pytest.raises(DataError, match="cannot be decoded"):
        consume()
    one.close()
    assert good == [0, 1, 2]


def test_an_error_in_the_list_of_updates_reaches_the_consumer() -> None:
    def broken() -> Iterator[Update]:
        yield next(updates())
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        read_all(loader(over=broken()))


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ghost-loader"]


def test_closing_early_ends_the_thread_promptly() -> None:
    endless = iterate_updates(STAGES.at, GHOST, NUM_PICTURES, 10**9)
    for consume in (0, 1):
        one = loader(over=endless)
        for _ in range(consume):
            update, ghosts = next(iter(one))
            assert len(list(ghosts)) == update.num_ghosts
        deadline = time.monotonic() + 10
        while not one._queue.full() and time.monotonic() < deadline:  # the thread now waits for room
            time.sleep(0.01)
        began = time.monotonic()
        one.close()
        assert time.monotonic() - began < 5
        assert threads() == []
        one.close()  # twice does no harm


def test_no_more_is_prepared_than_asked_for() -> None:
    pictures = Breaking()
    one = loader(of=pictures, ahead=3)
    deadline = time.monotonic() + 10
    while not one._queue.full() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    # The queue holds three of: update, ghost, update; one more ghost waits outside.
    assert pictures.num_reads <= 3 * GHOST
    one.close()


def test_the_last_item_is_not_lost_when_it_comes_at_the_end_of_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread may put its last item and end just after the consumer's wait ran out: that is no silent death."""
    go_on = threading.Event()

    def late() -> Iterator[Update]:
        go_on.wait(timeout=30)
        yield from ()

    one = loader(over=late())
    real, waits = one._queue.get, iter([True])

    def get(block: bool = True, timeout: float | None = None) -> object:
        if next(waits, False):
            go_on.set()
            one._thread.join(timeout=10)
            raise queue.Empty
        return real(block, timeout)

    monkeypatch.setattr(one._queue, "get", get)
    assert list(one) == []
    one.close()
