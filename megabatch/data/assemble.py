"""Turns sample numbers into arrays of pixels and labels: read, augment or fit, stack.

A training picture is a pure function of (seed, epoch, sample), an evaluation picture of its index: neither
depends on the other pictures of the call, so any split of the work over workers gives the same bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megabatch.data.augment import (
    Augmentation,
    flip_where,
    keyed_uniforms,
    pad_crop_flip,
    resize,
    resized_crop_box,
)
from megabatch.data.sources import PictureArray, Source

__all__ = ["assemble_evaluation", "assemble_training", "fit"]

Assembled = tuple[NDArray[np.uint8], NDArray[np.int64]]


def assemble_training(
    source: Source,
    augmentation: Augmentation,
    image_size: int,
    seed: int,
    epochs: NDArray[np.int64] | int,
    samples: NDArray[np.int64],
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
        picture = source.read(sample)
        height, width, _ = picture.shape
        box = resized_crop_box(height, width, augmentation, uniforms[at, 1:])
        pictures[at] = resize(picture, image_size, image_size, box)
    if augmentation.flip:
        flip_where(pictures, uniforms[:, 0] < 0.5)
    return pictures, labels


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
