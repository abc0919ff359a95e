"""Images drawn by a formula: shapes filled with stripes on striped ground, for machines without data.

A class is a shape (one of ten), a slope of the stripes inside it and one of the stripes around it. Place,
size, tilt, contrast, tint, and phase, pitch and direction (up or down) of the stripes vary from image to
image, and noise is added: a network has to learn what makes the class, and what it learnt on train holds on
val. A mirrored image is of the same class, so the set goes with flips.

An image is a pure function of (seed, split, index). Only integer arithmetic and exactly rounded operations
(+ - * / floor) are used, so it is the same bit for bit on every platform and in every batch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megabatch.data.jpeg import Pixels
from megabatch.data.randomness import Floats, Ints, keyed_bits, keyed_uniforms
from megabatch.data.sources import MEMORY_LIMIT_BYTES, ImageArray, Source, Split, checked_labels
from megabatch.errors import ConfigError

# float32 throughout: numpy keeps an array's type when a Python number joins.
Field = NDArray[np.floating[Any]]

# Keeps these draws apart from those of the augmentation, which may well be given the same seed.
SEED_MARK = 0x67656E6572617465
PARAMETER_STREAM = {"train": 0, "val": 1}
NOISE_STREAM = {"train": 2, "val": 3}
NUM_PARAMETERS = 16

CHUNK_PIXELS = 2**18  # a chunk's fields stay in the processor's cache


class GeneratedImages(Source):
    """The set as a whole; images are drawn when they are read."""

    def __init__(
        self, split: Split, num_images: int, image_size: int, channels: int, num_classes: int, seed: int
    ) -> None:
        for name, value, least in (
            ("num_images", num_images, 1),
            ("image_size", image_size, 8),
            ("num_classes", num_classes, 2),
            ("seed", seed, 0),
        ):
            if value < least:
                raise ConfigError(f"{name} of the generated images is {value}; it must be at least {least}")
        if channels not in (1, 3):
            raise ConfigError(f"channels of the generated images is {channels}; it must be 1 or 3")
        self.name, self.channels, self.image_size = f"generated {split}", channels, image_size
        labels = np.arange(num_images, dtype=np.int64) % num_classes
        self.labels, self.num_classes = checked_labels(self.name, labels, num_images, num_classes)
        self._split, self._seed = split, seed ^ SEED_MARK

    def read(self, index: int) -> Pixels:
        image: Pixels = self.render(np.array([index]))[0]
        return image

    def render(self, indices: Ints) -> Pixels:
        """The images with these indices, [n, image_size, image_size, channels]."""
        size = self.image_size
        u = keyed_uniforms(self._seed, PARAMETER_STREAM[self._split], indices, NUM_PARAMETERS).T
        shape, inner, outer, num_slopes = class_parts(self.labels[indices], self.num_classes)
        centres = ((2 * np.arange(size) + 1) / size - 1).astype(np.float32)  # of the pixels, in -1 .. 1
        y, x = centres[:, None], centres[None, :]

        radius = between(u[0], 0.42, 0.62)
        left, top = between(u[1], -0.25, 0.25), between(u[2], -0.25, 0.25)
        cosine, sine = rational_circle(between(u[3], -0.12, 0.12))  # tilted by up to 14 degrees
        across = ((x - left) * cosine + (y - top) * sine) / radius
        along = ((y - top) * cosine - (x - left) * sine) / radius
        inside = np.empty((len(indices), size, size), dtype=np.float32)
        for number, depth in enumerate(SHAPES):
            if (chosen := np.flatnonzero(shape == number)).size:
                inside[chosen] = depth(across[chosen], along[chosen])
        inside *= radius * size / 2  # from units of the radius to pixels: an edge one pixel wide
        inside += 0.5
        np.clip(inside, 0, 1, out=inside)

        cycles = min(6.0, size / 4) / 2  # over half the image; at least four pixels to a stripe
        ground = stripes(x, y, (outer + 0.2 + 0.6 * u[4]) / num_slopes, cycles, u[5:8])
        filling = stripes(x, y, (inner + 0.2 + 0.6 * u[8]) / num_slopes, cycles, u[9:12])
        ground *= between(u[12], 0.08, 0.16)
        filling *= between(u[13], 0.12, 0.22)
        filling += between(u[14], 0.15, 0.35)
        grey = ground + (filling - ground) * inside + between(u[15], 0.25, 0.4)
        return self._with_noise(indices, grey)

    def _with_noise(self, indices: Ints, grey: Field) -> Pixels:
        """Tints, adds noise (triangular, standard deviation 26 of 255 levels) and cuts to whole levels."""
        num_values = grey[0].size * self.channels
        tint_and_noise = keyed_bits(self._seed, NOISE_STREAM[self._split], indices, 1 + -(-num_values // 4))
        noise_bytes = np.ascontiguousarray(tint_and_noise[:, 1:].astype("<u8")).view(np.uint8)
        noise = noise_bytes[:, 0::2].astype(np.float32) + noise_bytes[:, 1::2]
        noise = noise[:, :num_values].reshape(*grey.shape, self.channels)
        noise -= 255
        noise *= 0.25
        levels = grey[..., None] * 255
        if self.channels == 3:
            tint = tint_and_noise[:, 0].astype("<u8").view(np.uint8).reshape(-1, 8)[:, :3]
            levels = levels * (0.7 + tint.astype(np.float32) / 850)[:, None, None, :]
        levels = levels + noise
        np.clip(levels, 0, 255, out=levels)
        return levels.astype(np.uint8)


def open_generated(
    path: Path | None,
    split: Split,
    *,
    num_images: int = 20_000,
    image_size: int = 32,
    channels: int = 3,
    num_classes: int = 10,
    seed: int = 0,
    memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
) -> Source:
    """Generated images, drawn at once when the set is small, else as they are read."""
    assert path is None
    source = GeneratedImages(split, num_images, image_size, channels, num_classes, seed)
    if num_images * image_size * image_size * channels > memory_limit_bytes:
        return source
    images = np.empty((num_images, image_size, image_size, channels), dtype=np.uint8)
    step = max(1, CHUNK_PIXELS // image_size**2)
    for start in range(0, num_images, step):
        indices = np.arange(start, min(start + step, num_images))
        images[indices] = source.render(indices)
    return ImageArray(source.name, images, source.labels, num_classes)


def class_parts(labels: Ints, num_classes: int) -> tuple[Ints, Ints, Ints, int]:
    """Shape, slope inside and slope around of each class, and how many slopes there are.

    With ten classes or fewer there is one slope only: the stripes then say nothing about the class.
    """
    num_slopes = 1
    while num_slopes * num_slopes * len(SHAPES) < num_classes:
        num_slopes += 1
    rest = labels // len(SHAPES)
    return labels % len(SHAPES), rest % num_slopes, rest // num_slopes, num_slopes


def between(uniform: Floats, low: float, high: float) -> Field:
    """A uniform draw stretched to low .. high, one for each image, shaped to go with [n, size, size]."""
    stretched: Field = (low + (high - low) * uniform).astype(np.float32)[:, None, None]
    return stretched


def rational_circle(tangent: Field) -> tuple[Field, Field]:
    """Cosine and sine of an angle given by the tangent of its half, without inexact library functions."""
    scale = 1 / (1 + tangent * tangent)
    return (1 - tangent * tangent) * scale, 2 * tangent * scale


def stripes(x: Field, y: Field, slope: Floats, cycles: float, uniforms: Floats) -> Field:
    """A triangle wave in -1 .. 1, [n, size, size], its slope (0 .. 1) a share of a right angle, up or down.

    `uniforms` [3, n]: phase, pitch, up or down.
    """
    q = between(np.where(uniforms[2] < 0.5, slope, -slope), 0, 1)
    # A cubic close to tan(q * 45 degrees): equal steps of the slope are nearly equal angles.
    cosine, sine = rational_circle(q * (0.785 + 0.215 * q * q))
    pitch = between(uniforms[1], 0.85 * cycles, 1.15 * cycles)
    wave = x * (cosine * pitch) + y * (sine * pitch)
    wave += between(uniforms[0], 0, 1)
    wave -= np.floor(wave)
    triangle: Field = np.abs(wave * 4 - 2) - 1
    return triangle


def _disc(u: Field, v: Field) -> Field:
    return (1 - (u * u + v * v)) / 2  # half of it: the slope at the edge is then 1


def _frame(u: Field, v: Field) -> Field:
    reach = np.maximum(np.abs(u), np.abs(v))
    return np.minimum(0.95 - reach, reach - 0.55)


def _plus(u: Field, v: Field) -> Field:
    beams, reach = 0.33 - np.minimum(np.abs(u), np.abs(v)), 1 - np.maximum(np.abs(u), np.abs(v))
    depth: Field = np.minimum(beams, reach)
    return depth


def _lying_bar(u: Field, v: Field) -> Field:
    return np.minimum(1.1 - np.abs(u), 0.4 - np.abs(v))


# Depth inside a shape of radius about 1, in units of the radius; negative outside.
SHAPES: tuple[Callable[[Field, Field], Field], ...] = (
    _disc,
    lambda u, v: 0.85 - np.maximum(np.abs(u), np.abs(v)),  # square
    lambda u, v: np.minimum(_disc(u, v), (u * u + v * v) - 0.3),  # ring
    _plus,
    lambda u, v: np.minimum(0.7 - v, (v + 1) * 0.45 - np.abs(u) * 0.9),  # triangle
    _lying_bar,
    lambda u, v: _lying_bar(v, u),  # standing bar
    lambda u, v: _plus((u + v) * 0.7, (u - v) * 0.7),  # times sign
    _frame,
    lambda u, v: (1.2 - np.abs(u) - np.abs(v)) * 0.7,  # diamond
)
