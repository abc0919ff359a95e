"""Turns sample numbers into arrays of pixels and labels: read, augment or fit, stack.

A training picture is a pure function of (seed, epoch, sample), an evaluation picture of its index: neither
depends on the other pictures of the call, so any split of the work over workers gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from megabatch.data.augment import Augmentation, pad_crop_flip, resized_crop_box
from megabatch.data.decode import EXACT, Decoding, crop_resized, resize, resize_into
from megabatch.data.geometry import Box
from megabatch.data.keyed import keyed_uniforms
from megabatch.data.sources import PictureArray, Source, picture_name

__all__ = ["assemble_evaluation", "assemble_training", "fit"]

Assembled = tuple[NDArray[np.uint8], NDArray[np.int64]]


def assemble_training(
    source: Source,
    augmentation: Augmentation,
    image_size: int,
    seed: int,
    epochs: NDArray[np.int64] | int,
    samples: NDArray[np.int64],
    decoding: Decoding = EXACT,
) -> Assembled:
    """Augmented pictures, [n, image_size, image_size, channels], C-contiguous, and their labels, [n].

    `epochs` is one for all or one for each sample. Raises DataError naming a picture that cannot be read.
    """
    if augmentation.crop == "none" and not augmentation.flip:
        return assemble_evaluation(source, image_size, samples)
    uniforms = keyed_uniforms(seed, epochs, samples, augmentation.num_draws)
    labels = source.labels[samples]
    if augmentation.crop != "resized":
        padding = augmentation.padding if augmentation.crop == "pad" else 0
        pictures = _fitted(source, image_size, samples)
        return pad_crop_flip(pictures, padding, augmentation.flip, uniforms), labels
    pictures = np.empty((len(samples), image_size, image_size, source.channels), dtype=np.uint8)
    for at, sample in enumerate(samples.tolist()):
        mirror = augmentation.flip and bool(uniforms[at, 0] < 0.5)
        _cut_one(source, sample, augmentation, uniforms[at, 1:], mirror, pictures[at], decoding)
    return pictures, labels


def _cut_one(
    source: Source,
    sample: int,
    augmentation: Augmentation,
    uniforms: NDArray[np.float64],
    mirror: bool,
    out: NDArray[np.uint8],
    decoding: Decoding,
) -> None:
    """Fills `out` with the random resized crop of a picture, decoding no more of it than needed."""

    def choose(height: int, width: int) -> Box:
        return resized_crop_box(height, width, augmentation, uniforms)

    read_bytes: Callable[[int], bytes] | None = getattr(source, "read_bytes", None)
    if read_bytes is not None:
        crop_resized(read_bytes(sample), choose, mirror, out, lambda: picture_name(source, sample), decoding)
        return
    picture = source.read(sample)
    resize_into(picture, choose(*picture.shape[:2]), mirror, out, decoding)


def assemble_evaluation(source: Source, image_size: int, indices: NDArray[np.int64]) -> Assembled:
    """Fitted pictures, [n, image_size, image_size, channels], C-contiguous, and their labels, [n].

    Raises DataError naming a picture that cannot be read.
    """
    return _fitted(source, image_size, indices), source.labels[indices]


def fit(picture: NDArray[np.uint8], image_size: int) -> NDArray[np.uint8]:
    """The picture [height, width, channels] as a square: as it is if its size is right, else scaled and cut.

    The shorter side becomes 8/7 of the wanted size (256 for 224) and the centre is cut out.
    """
    height, width, _ = picture.shape
    if height == width == image_size:
        return picture
    scale = round(image_size * 8 / 7) / min(height, width)
    scaled_height, scaled_width = round(height * scale), round(width * scale)
    scaled = resize(picture, scaled_height, scaled_width)
    top, left = (scaled_height - image_size) // 2, (scaled_width - image_size) // 2
    return scaled[top : top + image_size, left : left + image_size]


def _fitted(source: Source, image_size: int, indices: NDArray[np.int64]) -> NDArray[np.uint8]:
    """A new array of the fitted pictures."""
    if isinstance(source, PictureArray) and source.pictures.shape[1:3] == (image_size, image_size):
        return source.pictures.take(indices, axis=0)
    pictures = np.empty((len(indices), image_size, image_size, source.channels), dtype=np.uint8)
    for at, index in enumerate(indices.tolist()):
        pictures[at] = fit(source.read(index), image_size)
    return pictures
