"""Turns sample numbers into arrays of pixels and labels: read, augment or fit, stack.

A training image is a pure function of (seed, epoch, sample), an evaluation image of its index: neither
depends on the other images of the call, so any split of the work over ranks gives the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from megabatch.data.augment import Augmentation, distort, pad_crop_flip, resized_crop_box
from megabatch.data.broken_images import MAX_NEIGHBOURS, Broken, BrokenLog
from megabatch.data.decode import EXACT, Decoding, crop_resized, resize, resize_into
from megabatch.data.jpeg import Box
from megabatch.data.randomness import keyed_uniforms
from megabatch.data.sources import ImageArray, Source, image_name
from megabatch.errors import DataError

__all__ = [
    *("GREY", "Feeding", "Job"),
    *("assemble_evaluation", "assemble_training", "evaluation_batches", "fill_training", "fit"),
]

GREY = 127
"""What evaluation shows in place of a broken image."""

Batch = tuple[NDArray[np.uint8], NDArray[np.int64]]


@dataclass(frozen=True)
class Feeding:
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
    epochs: NDArray[np.int64]
    samples: NDArray[np.int64]


def fill_training(
    source: Source,
    job: Job,
    images: NDArray[np.uint8],
    labels: NDArray[np.int64],
    decoding: Decoding = EXACT,
    broken: list[Broken] | None = None,
    watch: Callable[[int], None] = lambda sample: None,
) -> None:
    """Fills `images`, [n, size, size, channels], and `labels`, [n], with what the job asks for.

    `watch` hears the sample that is about to be read. Broken images are replaced (see `megabatch.data.broken_images`)
    and added to `broken`; without that list the first one raises DataError.
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
    if augmentation.distorts:
        distort(images, augmentation, uniforms[:, augmentation.num_crop_draws :])


def assemble_training(
    source: Source,
    augmentation: Augmentation,
    image_size: int,
    seed: int,
    epochs: NDArray[np.int64] | int,
    samples: NDArray[np.int64],
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


def assemble_evaluation(
    source: Source, image_size: int, indices: NDArray[np.int64], broken: list[Broken] | None = None
) -> Batch:
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
            broken.append(Broken(index, image_name(source, index), str(error)))
            images[at] = GREY
    return images, labels


def evaluation_batches(
    source: Source, image_size: int, begin: int, end: int, images_per_batch: int, feeding: Feeding
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


def fit(image: NDArray[np.uint8], image_size: int) -> NDArray[np.uint8]:
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
            broken.append(Broken(index, image_name(source, index), str(error)))
            last = error
    raise DataError(f"{MAX_NEIGHBOURS + 1} images in a row cannot be read; the last: {last}")


def _one(
    source: Source,
    job: Job,
    uniforms: NDArray[np.float64],
    mirror: bool,
    out: NDArray[np.uint8],
    decoding: Decoding,
    index: int,
) -> None:
    """Fills `out` with a random resized crop, decoding no more than needed, or with the fitted image."""
    if job.augmentation.crop != "resized":
        out[:] = fit(source.read(index), out.shape[0])
        return

    def choose(height: int, width: int) -> Box:
        return resized_crop_box(height, width, job.augmentation, uniforms[1 : job.augmentation.num_crop_draws])

    read_bytes: Callable[[int], bytes] | None = getattr(source, "read_bytes", None)
    if read_bytes is not None:
        crop_resized(read_bytes(index), choose, mirror, out, lambda: image_name(source, index), decoding)
        return
    image = source.read(index)
    resize_into(image, choose(*image.shape[:2]), mirror, out, decoding)
