"""The loader: the same ghost batches bit for bit on any number of workers and from any point of the run."""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from megabatch.data import batches
from megabatch.data.augment import Augmentation
from megabatch.data.batches import BrokenLog, LoaderSettings, assemble_training
from megabatch.data.formats import open_source
from megabatch.data.loader import Ghost, GhostLoader, Mixed
from megabatch.data.mix import mix
from megabatch.data.randomness import keyed_uniforms, sample_stream
from megabatch.data.sources import ImageArray, Source
from megabatch.errors import DataError
from megabatch.schedule.batch import Step, iterate_steps, parse_stages
from tests.data.conftest import write_tar
from tests.data.images import encoded, photograph

GHOST, NUM_IMAGES, TOTAL, SEED, SIZE = 4, 30, 100, 11, 8
STAGES = parse_stages("0:4 0.5:12 2:40")  # one, three and ten ghosts: fewer, as many and more than workers
AUGMENTATION = Augmentation(crop="pad", padding=1, flip=True)


def source() -> ImageArray:
    pixels = np.random.default_rng(0).integers(0, 256, (NUM_IMAGES, SIZE, SIZE, 3), dtype=np.uint8)
    return ImageArray("test", pixels, np.arange(NUM_IMAGES) % 10)


def steps(start_samples: int = 0, start_index: int = 0, rank: int = 0, world_size: int = 1) -> Iterator[Step]:
    for step in iterate_steps(
        STAGES.at, GHOST, NUM_IMAGES, TOTAL, start_samples=start_samples, start_index=start_index
    ):
        yield replace(step, rank=rank, world_size=world_size)


def loader(
    rank: int = 0,
    world_size: int = 1,
    *,
    of: Source | None = None,
    over: Iterator[Step] | None = None,
    ahead: int = 2,
    feeding: LoaderSettings | None = None,
) -> GhostLoader:
    return GhostLoader(
        of or source(),
        AUGMENTATION,
        SIZE,
        SEED,
        over or steps(rank=rank, world_size=world_size),
        prefetch_ghosts=ahead,
        feeding=feeding,
    )


def read_all(one: GhostLoader) -> list[tuple[Step, list[Ghost]]]:
    try:
        return [(step, list(ghosts)) for step, ghosts in one]
    finally:
        one.close()


def same(one: Ghost, other: Ghost) -> bool:
    def parts(ghost: Ghost) -> list[Tensor]:
        mixed = ghost.mixed
        return [ghost.images, ghost.labels, *([mixed.labels, mixed.shares] if mixed else [])]

    pairs = zip(parts(one), parts(other), strict=True)
    return one.number == other.number and all(torch.equal(left, right) for left, right in pairs)


def test_one_worker_gets_the_images_of_the_stream() -> None:
    got = read_all(loader())
    assert [step for step, _ in got] == list(steps())
    ghosts = [ghost for _, of_step in got for ghost in of_step]
    assert [ghost.number for ghost in ghosts] == list(range(TOTAL // GHOST))
    for ghost in ghosts:
        epochs, samples = sample_stream(SEED, NUM_IMAGES, ghost.number * GHOST, GHOST)
        images, labels = assemble_training(source(), AUGMENTATION, SIZE, SEED, epochs, samples)
        assert torch.equal(ghost.images, torch.from_numpy(images))
        assert torch.equal(ghost.labels, torch.from_numpy(labels))
        assert (ghost.images.dtype, ghost.images.shape) == (torch.uint8, (GHOST, SIZE, SIZE, 3))
        assert (ghost.labels.dtype, ghost.labels.shape) == (torch.int64, (GHOST,))
        assert not ghost.idle


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_together_get_what_one_rank_gets(world_size: int) -> None:
    alone = read_all(loader())
    together = [read_all(loader(rank, world_size)) for rank in range(world_size)]
    idle = 0
    for number, (step, expected) in enumerate(alone):
        assert all(replace(of_rank[number][0], rank=0, world_size=1) == step for of_rank in together)
        all_ghosts = [ghost for of_rank in together for ghost in of_rank[number][1]]
        working = [ghost for ghost in all_ghosts if not ghost.idle]
        assert len(working) == len(expected)
        assert all(map(same, working, expected))
        # A rank without work still has one pass to make, or the others would wait for its gradients.
        assert all(of_rank[number][1] for of_rank in together)
        for ghost in all_ghosts:
            idle += ghost.idle
            assert not ghost.idle or same(ghost, expected[0])
    assert idle > 0


def test_from_the_middle_the_tail_comes() -> None:
    whole = read_all(loader(1, 2))
    for at in (1, 3, len(whole) - 1):
        step = whole[at][0]
        tail = read_all(loader(over=steps(step.start_samples, step.index, 1, 2)))
        assert [u for u, _ in tail] == [u for u, _ in whole[at:]]
        for (_, ghosts), (_, expected) in zip(tail, whole[at:], strict=True):
            assert [ghost.idle for ghost in ghosts] == [ghost.idle for ghost in expected]
            assert all(map(same, ghosts, expected))


class Breaking(ImageArray):
    """Raises at the n-th ghost; `hold` makes every read wait."""

    def __init__(self, after: int = 10**9, hold: threading.Event | None = None) -> None:
        whole = source()
        super().__init__("breaking", whole.images, whole.labels)
        self.after, self.hold, self.num_reads = after, hold, 0
        # Another size than asked for makes the loader read image by image.
        self.images = self.images[:, :-1]

    def read(self, index: int) -> NDArray[np.uint8]:
        self.num_reads += 1
        if self.hold is not None:
            self.hold.wait(timeout=30)
        if self.num_reads > self.after:
            raise DataError(f"image {index} cannot be decoded; remove it")
        return super().read(index)


def test_an_unreadable_image_reaches_the_consumer_after_the_good_ghosts() -> None:
    one = loader(of=Breaking(after=3 * GHOST + 1))
    good: list[int] = []

    def consume() -> None:
        for _, ghosts in one:
            good.extend(ghost.number for ghost in ghosts)

    with pytest.raises(DataError, match="cannot be decoded"):
        consume()
    one.close()
    assert good == [0, 1, 2]


def test_an_error_in_the_list_of_steps_reaches_the_consumer() -> None:
    def ending() -> Iterator[Step]:
        yield next(steps())
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        read_all(loader(over=ending()))


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("ghost-")]


def test_closing_early_ends_the_thread_promptly() -> None:
    endless = iterate_steps(STAGES.at, GHOST, NUM_IMAGES, 10**9)
    for consume in (0, 1):
        one = loader(over=endless)
        for _ in range(consume):
            step, ghosts = next(iter(one))
            assert len(list(ghosts)) == step.num_ghosts
        deadline = time.monotonic() + 10
        while one._room._value and time.monotonic() < deadline:  # the planning thread now waits for room
            time.sleep(0.01)
        began = time.monotonic()
        one.close()
        assert time.monotonic() - began < 30  # the list of steps has no end
        assert threads() == []
        one.close()  # twice does no harm


def test_no_more_is_prepared_than_asked_for() -> None:
    images = Breaking()
    one = loader(of=images, ahead=3)
    deadline = time.monotonic() + 10
    while images.num_reads < 3 * GHOST and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    assert images.num_reads == 3 * GHOST
    one.close()


def test_the_last_item_is_not_lost_when_it_comes_at_the_end_of_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread may put its last item and end just after the consumer's wait ran out: that is no silent death."""
    go_on = threading.Event()

    def late() -> Iterator[Step]:
        go_on.wait(timeout=30)
        yield from ()

    one = loader(over=late())
    real, waits = one._items.get, iter([True])

    def get(block: bool = True, timeout: float | None = None) -> object:
        if next(waits, False):
            go_on.set()
            one._threads[0].join(timeout=10)
            raise queue.Empty
        return real(block, timeout)

    monkeypatch.setattr(one._items, "get", get)
    assert list(one) == []
    one.close()


# --- threads, processes, sizes, broken images ---

ALL_CHANGES = Augmentation(
    crop="resized",
    flip=True,
    brightness=0.4,
    contrast=0.4,
    rotation_degrees=9,
    noise_std=4,
    erase=0.3,
    policy="rand",
    mixup=0.4,
    cutmix=1.0,
)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Thirty JPEG files of odd sizes in two shards."""
    folder = tmp_path_factory.mktemp("shards")
    for part in range(2):
        members = []
        for i in range(15 * part, 15 * part + 15):
            members += [(f"{i:03}.jpg", encoded(photograph(20 + i, 45 - i, seed=i))), (f"{i:03}.cls", b"%d" % (i % 10))]
        write_tar(folder / f"train-{part}.tar", members)
    return open_source("tar", folder, "train", memory_limit_bytes=0)


def over_photographs(
    of: Source, rank: int, world_size: int, feeding: LoaderSettings, start: tuple[int, int] = (0, 0)
) -> list[tuple[Step, list[Ghost]]]:
    """With images that grow: 16 pixels wide in the first epoch, then 24."""
    return read_all(
        GhostLoader(
            of,
            ALL_CHANGES,
            lambda epoch: 16 if epoch < 1 else 24,
            SEED,
            steps(*start, rank, world_size),
            feeding=feeding,
            largest_image_size=24,
        )
    )


def by_number(batches: list[tuple[Step, list[Ghost]]]) -> dict[int, Ghost]:
    return {ghost.number: ghost for _, ghosts in batches for ghost in ghosts if not ghost.idle}


@pytest.fixture(scope="module")
def expected(photographs: Source) -> dict[int, Ghost]:
    """One worker, one thread."""
    ghosts = by_number(over_photographs(photographs, 0, 1, LoaderSettings()))
    assert {tuple(ghost.images.shape[1:3]) for ghost in ghosts.values()} == {(16, 16), (24, 24)}
    return ghosts


@pytest.mark.parametrize(
    ("world_size", "feeding"),
    [
        (1, LoaderSettings(threads=3)),
        (1, LoaderSettings(processes=1)),
        (2, LoaderSettings(threads=2)),
        (2, LoaderSettings(processes=2)),
        pytest.param(2, LoaderSettings(processes=1), marks=pytest.mark.slow),
        pytest.param(4, LoaderSettings(threads=2), marks=pytest.mark.slow),
        pytest.param(4, LoaderSettings(processes=1), marks=pytest.mark.slow),
        pytest.param(4, LoaderSettings(processes=2), marks=pytest.mark.slow),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else f"{value.threads}t{value.processes}p",
)
def test_pixels_do_not_depend_on_ranks_threads_and_processes(
    photographs: Source, expected: dict[int, Ghost], world_size: int, feeding: LoaderSettings
) -> None:
    got: dict[int, Ghost] = {}
    for rank in range(world_size):
        got |= by_number(over_photographs(photographs, rank, world_size, feeding))
    assert got.keys() == expected.keys()
    assert all(same(got[number], expected[number]) for number in expected)


def test_resuming_at_any_step_gives_the_same_ghosts(photographs: Source, expected: dict[int, Ghost]) -> None:
    for step in steps():
        tail = by_number(
            over_photographs(photographs, 0, 1, LoaderSettings(threads=2), (step.start_samples, step.index))
        )
        assert min(tail) == step.start_samples // GHOST
        assert all(same(ghost, expected[number]) for number, ghost in tail.items())


def test_a_mixture_is_that_of_the_ghost_batch(photographs: Source, expected: dict[int, Ghost]) -> None:
    """The slow way: the images one by one, then the mixture of the whole ghost batch."""
    sizes = {(step.start_samples + i * GHOST) // GHOST: step.epoch for step in steps() for i in range(step.num_ghosts)}
    for number, ghost in expected.items():
        epochs, samples = sample_stream(SEED, NUM_IMAGES, number * GHOST, GHOST)
        size = 16 if sizes[number] < 1 else 24
        images, labels = assemble_training(photographs, ALL_CHANGES, size, SEED, epochs, samples)
        draws = keyed_uniforms(SEED, epochs, samples, ALL_CHANGES.num_draws)[:, ALL_CHANGES.draws_of("mix")]
        shares = mix(images, ALL_CHANGES, draws)
        partners = torch.from_numpy(np.append(labels[1:], labels[0]))
        mixed = Mixed(partners, torch.from_numpy(shares))
        assert same(ghost, Ghost(torch.from_numpy(images), torch.from_numpy(labels), number, mixed=mixed))


def test_shared_memory_is_used_again_once_it_is_let_go(photographs: Source) -> None:
    one = loader(of=photographs, feeding=LoaderSettings(processes=1), ahead=2)
    for _, ghosts in one:
        for ghost in ghosts:
            assert ghost.images.sum() > 0
            del ghost
    assert one._slots is not None
    assert len(one._slots._maps) <= 4
    one.close()
    assert threads() == []


class Deadly(ImageArray):
    """Ends the process that reads image 17."""

    def read(self, index: int) -> NDArray[np.uint8]:
        if index == 17:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(index)[:-1]


def test_a_process_that_dies_names_the_image() -> None:
    one = loader(of=Deadly("deadly", source().images[:, :-1], source().labels), feeding=LoaderSettings(processes=2))
    with pytest.raises(DataError, match=r"a loader process was ended by SIGKILL while it had the image 17 of deadly; "):
        read_all(one)
    assert threads() == []


class Holes(ImageArray):
    """Images 3, 4 and 20 cannot be read."""

    def read(self, index: int) -> NDArray[np.uint8]:
        if index in (3, 4, 20):
            raise DataError(f"cannot decode the image {index} of holes")
        return super().read(index)


def holes() -> Holes:
    return Holes("holes", np.ascontiguousarray(source().images[:, :-1]), np.arange(NUM_IMAGES))


@pytest.mark.parametrize(("threads_", "processes"), [(1, 0), (2, 0), (0, 1)])
def test_broken_images_are_replaced_counted_and_listed(tmp_path: Path, threads_: int, processes: int) -> None:
    log = BrokenLog(0.01, tmp_path / "run" / "broken.jsonl", "holes")
    feeding = LoaderSettings(threads=threads_, processes=processes, broken=log)
    ghosts = by_number(read_all(loader(of=holes(), feeding=feeding)))
    labels = {int(label) for ghost in ghosts.values() for label in ghost.labels}
    assert labels == set(range(NUM_IMAGES)) - {3, 4, 20}
    for ghost in ghosts.values():
        _, samples = sample_stream(SEED, NUM_IMAGES, ghost.number * GHOST, GHOST)
        replaced = [{3: 5, 4: 5, 20: 21}.get(sample, sample) for sample in samples.tolist()]
        assert ghost.labels.tolist() == replaced
    listed = [json.loads(line) for line in (tmp_path / "run" / "broken.jsonl").read_text().splitlines()]
    assert sorted(entry["index"] for entry in listed) == [3, 4, 20]
    assert listed[0]["set"] == "holes"
    assert "cannot decode the image" in listed[0]["reason"]
    assert log.num_read == TOTAL
    assert log.num_broken >= 3


def test_too_many_broken_images_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "JUDGED_OVER_IMAGES", 10)
    with pytest.raises(DataError, match=r"of \d+ images read were broken, data.max_broken_share allows 0.05; the last"):
        read_all(loader(of=holes(), feeding=LoaderSettings(broken=BrokenLog(0.05))))
    with pytest.raises(DataError, match=r"^cannot decode the image \d+ of holes$"):
        read_all(loader(of=holes(), feeding=LoaderSettings()))
