"""Turns sample numbers into arrays of pixels and labels: read, augment or fit, stack.

A training image is a pure function of (seed, epoch, sample), an evaluation image of its index: neither
depends on the other images of the call, so any split of the work over ranks gives the same bits.

Images that cannot be read: in training a broken image is replaced by the next readable one by index, with that one's
label, under the random draws of the image it stands in for. Batches stay whole, and the outcome depends on the set
alone, not on ranks or loader processes. In evaluation a broken image is shown as plain grey under its own label, so
that the set keeps its size and a network is not rewarded for what cannot be seen.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from megabatch.data.augment import Augmentation, distort, erase, pad_crop_flip, resized_crop_box
from megabatch.data.decode import EXACT, Decoding, crop_resized, resize, resize_into
from megabatch.data.jpeg import Box, Pixels
from megabatch.data.policy import apply_policy
from megabatch.data.randomness import Floats, Ints, keyed_uniforms
from megabatch.data.sources import ImageArray, Source
from megabatch.errors import DataError

GREY = 127
"""What evaluation shows in place of a broken image."""

MAX_NEIGHBOURS = 16
"""So many broken images in a row by index mean that a shard or a disk is gone: the run stops."""

JUDGED_OVER_IMAGES = 10_000
"""The share of broken images is taken of no fewer than so many, or the first one would be 100 %."""

Batch = tuple[Pixels, Ints]


@dataclass(frozen=True)
class Broken:
    """An image that could not be read, and why."""

    index: int
    name: str
    reason: str


class BrokenLog:
    """Counts the broken images that one rank met, lists each once, stops the run when they are too many.

    `max_share` is the largest tolerated share of the images read; with 0 the first broken image stops the run.
    Written as lines of JSON to `path`, which is made when the first line is.
    """

    def __init__(self, max_share: float, path: Path | None = None, set_name: str = "") -> None:
        self.max_share = max_share
        self.num_read = 0
        self.num_broken = 0
        self._path, self._set_name = path, set_name
        self._listed: set[int] = set()

    @property
    def is_tolerant(self) -> bool:
        return self.max_share > 0

    def note(self, num_read: int, broken: list[Broken]) -> None:
        """Adds what a batch brought. Raises DataError when too many images are broken."""
        self.num_read += num_read
        self.num_broken += len(broken)
        new = [one for one in broken if one.index not in self._listed]
        self._listed.update(one.index for one in new)
        if new and self._path is not None:
            lines = "".join(json.dumps({"set": self._set_name, **asdict(one)}) + "\n" for one in new)
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with open(self._path, "a", encoding="utf-8") as file:
                    file.write(lines)
            except OSError as error:
                raise DataError(
                    f"cannot write {self._path}: {error.strerror}; make room there, then --resume"
                ) from None
        if broken and self.num_broken > self.max_share * max(self.num_read, JUDGED_OVER_IMAGES):
            where = f" (listed in {self._path})" if self._path and self.max_share else ""
            raise DataError(
                f"{self.num_broken} of {self.num_read} images read were broken{where}, data.max_broken_share allows "
                f"{self.max_share:g}; the last: {broken[-1].reason}"
            )


@dataclass(frozen=True)
class LoaderSettings:
    """How the images of one rank are prepared; nothing in it changes a pixel but `decoding`."""

    threads: int = 1  # that prepare images in this process, when there are no processes
    processes: int = 0  # that prepare images instead
    decoding: Decoding = EXACT
    broken: BrokenLog = field(default_factory=lambda: BrokenLog(0.0))


@dataclass(frozen=True)
class Job:
    """Training images to make: which, and how. `epochs` and `samples` are [n]."""

    augmentation: Augmentation
    seed: int
    epochs: Ints
    samples: Ints


def fill_training(
    source: Source,
    job: Job,
    images: Pixels,
    labels: Ints,
    decoding: Decoding = EXACT,
    broken: list[Broken] | None = None,
    watch: Callable[[int], None] = lambda sample: None,
) -> None:
    """Fills `images`, [n, size, size, channels], and `labels`, [n], with what the job asks for.

    `watch` hears the sample that is about to be read. Broken images are replaced and added to `broken`; without that
    list the first one raises DataError.
    """
    augmentation, samples, size = job.augmentation, job.samples, images.shape[1]
    uniforms = keyed_uniforms(job.seed, job.epochs, samples, augmentation.num_draws)
    labels[:] = source.labels[samples]
    if isinstance(source, ImageArray) and augmentation.crop != "resized" and source.images.shape[1:3] == (size, size):
        images[:] = source.images.take(samples, axis=0)
    else:
        for at, sample in enumerate(samples.tolist()):
            watch(sample)
            mirror = augmentation.flip and bool(uniforms[at, 0] < 0.5)
            make = partial(_one, source, job, uniforms[at], mirror, images[at], decoding)
            labels[at] = source.labels[_first_readable(source, sample, broken, make)]
    if augmentation.crop != "resized":
        padding = augmentation.padding if augmentation.crop == "pad" else 0
        if padding or augmentation.flip:
            images[:] = pad_crop_flip(images, padding, augmentation.flip, uniforms)
    if augmentation.policy != "none":
        apply_policy(images, augmentation, uniforms[:, augmentation.draws_of("policy")])
    if augmentation.distorts:
        distort(images, augmentation, uniforms[:, augmentation.draws_of("distort")])
    if augmentation.erase:
        erase(images, augmentation.erase, uniforms[:, augmentation.draws_of("erase")])


def assemble_training(
    source: Source,
    augmentation: Augmentation,
    image_size: int,
    seed: int,
    epochs: Ints | int,
    samples: Ints,
    *,
    tolerant: bool = False,
) -> Batch:
    """Augmented images, [n, image_size, image_size, channels], C-contiguous, and their labels, [n].

    `epochs` is one for all or one for each sample. Raises DataError naming an image that cannot be read, unless
    `tolerant`: then it is replaced as in training, and not counted.
    """
    images = np.empty((len(samples), image_size, image_size, source.channels), dtype=np.uint8)
    labels = np.empty(len(samples), dtype=np.int64)
    each = np.broadcast_to(np.asarray(epochs, dtype=np.int64), samples.shape)
    fill_training(source, Job(augmentation, seed, each, samples), images, labels, broken=[] if tolerant else None)
    return images, labels


def assemble_evaluation(source: Source, image_size: int, indices: Ints, broken: list[Broken] | None = None) -> Batch:
    """Fitted images, [n, image_size, image_size, channels], C-contiguous, and their labels, [n].

    A broken image is plain grey and added to `broken`; without that list DataError is raised.
    """
    labels = source.labels[indices]
    if isinstance(source, ImageArray) and source.images.shape[1:3] == (image_size, image_size):
        return source.images.take(indices, axis=0), labels
    images = np.empty((len(indices), image_size, image_size, source.channels), dtype=np.uint8)
    for at, index in enumerate(indices.tolist()):
        try:
            images[at] = fit(source.read(index), image_size)
        except DataError as error:
            if broken is None:
                raise
            broken.append(Broken(index, source.name_of(index), str(error)))
            images[at] = GREY
    return images, labels


def evaluation_batches(
    source: Source, image_size: int, begin: int, end: int, images_per_batch: int, feeding: LoaderSettings
) -> Iterator[Batch]:
    """Images `begin` to `end` of the source, fitted, with their labels: each once and in order.

    A few threads prepare them, at most a batch per thread ahead. Raises DataError for a broken image, or when there are
    more of them than `feeding.broken` allows.
    """

    def make(first: int) -> tuple[Batch, list[Broken]]:
        broken: list[Broken] = []
        indices = np.arange(first, min(end, first + images_per_batch))
        return assemble_evaluation(source, image_size, indices, broken if feeding.broken.is_tolerant else None), broken

    def finished(future: Future[tuple[Batch, list[Broken]]]) -> Batch:
        batch, broken = future.result()
        feeding.broken.note(len(batch[1]), broken)
        return batch

    # Images in memory are only copied: threads would have nothing to share.
    num_threads = 1 if isinstance(source, ImageArray) else max(1, feeding.threads, feeding.processes)
    ahead: deque[Future[tuple[Batch, list[Broken]]]] = deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="evaluation") as pool:
        try:
            for first in range(begin, end, images_per_batch):
                ahead.append(pool.submit(make, first))
                if len(ahead) > num_threads:
                    yield finished(ahead.popleft())
            while ahead:
                yield finished(ahead.popleft())
        finally:
            for future in ahead:
                future.cancel()


def fit(image: Pixels, image_size: int) -> Pixels:
    """The image [height, width, channels] as a square: as it is if its size is right, else scaled and cut.

    The shorter side becomes 8/7 of the wanted size (256 for 224) and the centre is cut out.
    """
    height, width, _ = image.shape
    if height == width == image_size:
        return image
    scale = round(image_size * 8 / 7) / min(height, width)
    scaled_height, scaled_width = round(height * scale), round(width * scale)
    scaled = resize(image, scaled_height, scaled_width)
    top, left = (scaled_height - image_size) // 2, (scaled_width - image_size) // 2
    return scaled[top : top + image_size, left : left + image_size]


def _first_readable(source: Source, sample: int, broken: list[Broken] | None, make: Callable[[int], None]) -> int:
    """Makes the image of the sample, or of the first one after it that can be read; says which."""
    for distance in range(MAX_NEIGHBOURS + 1):
        index = (sample + distance) % len(source)
        try:
            make(index)
            return index
        except DataError as error:
            if broken is None:
                raise
            broken.append(Broken(index, source.name_of(index), str(error)))
            last = error
    raise DataError(f"{MAX_NEIGHBOURS + 1} images in a row cannot be read; the last: {last}")


def _one(source: Source, job: Job, uniforms: Floats, mirror: bool, out: Pixels, decoding: Decoding, index: int) -> None:
    """Fills `out` with a random resized crop, decoding no more than needed, or with the fitted image."""
    if job.augmentation.crop != "resized":
        out[:] = fit(source.read(index), out.shape[0])
        return

    def choose(height: int, width: int) -> Box:
        return resized_crop_box(height, width, job.augmentation, uniforms[1 : job.augmentation.num_crop_draws])

    if (encoded := source.read_bytes(index)) is not None:
        crop_resized(encoded, choose, mirror, out, lambda: source.name_of(index), decoding)
        return
    image = source.read(index)
    resize_into(image, choose(*image.shape[:2]), mirror, out, decoding)
