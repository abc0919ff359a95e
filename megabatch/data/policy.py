"""RandAugment and TrivialAugment: random operations on a whole image, a pure function of the draws.

TrivialAugment (Mueller and Hutter 2021, the "wide" ranges): one operation, each as likely, its strength one of 0 .. 30.
RandAugment (Cubuk et al. 2019): several operations, each as likely, all with the same strength. Names and ranges are
those of both papers as torchvision has them. Where a sign makes sense it is drawn. What comes from outside is black.

Operations that look at single values are tables of 256 entries, in whole numbers; those that move pixels are affine
maps about the image's centre, interpolated linearly by Pillow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from megabatch.data.augment import OPERATION_DRAWS, Augmentation, recoloured
from megabatch.data.jpeg import Pixels
from megabatch.data.randomness import Floats

_LEVELS = 30
_SMOOTH_CENTRE, _SMOOTH_SUM = 5, 13
"""A pixel's mean with its eight neighbours, in which it counts five times."""


@dataclass(frozen=True)
class Ranges:
    """The largest effects, at strength 30."""

    factor: float  # of brightness, colour, contrast and sharpness: from 1 - this to 1 + this
    shear: float
    degrees: float
    bits: int  # that posterize takes away
    pixels: float  # of a translation
    side_share: float  # of a translation, besides


TRIVIAL = Ranges(factor=0.99, shear=0.99, degrees=135.0, bits=6, pixels=32.0, side_share=0.0)
RAND = Ranges(factor=0.9, shear=0.3, degrees=30.0, bits=4, pixels=0.0, side_share=150 / 331)


def apply_policy(images: Pixels, policy: Augmentation, uniforms: Floats) -> None:
    """Changes the images, [n, height, width, channels], in place; `uniforms`: OPERATION_DRAWS for each operation."""
    ranges = TRIVIAL if policy.policy == "trivial" else RAND
    for image, draws in zip(images, uniforms.tolist(), strict=True):
        for first in range(0, len(draws), OPERATION_DRAWS):
            which, for_strength, for_sign = draws[first : first + OPERATION_DRAWS]
            level = int(for_strength * (_LEVELS + 1)) if policy.policy == "trivial" else policy.rand_magnitude
            operation = OPERATIONS[int(which * len(OPERATIONS))]
            image[:] = operate(image, operation, level / _LEVELS, -1.0 if for_sign < 0.5 else 1.0, ranges)


def operate(image: Pixels, operation: str, strength: float, sign: float, ranges: Ranges) -> NDArray[np.generic]:
    """One operation of OPERATIONS on an image [height, width, channels]; strength from 0 to 1, sign -1 or 1."""
    height, width, _ = image.shape
    if table_of := _TABLES.get(operation):
        return _by_channel(image, table_of)
    if operation in ("brightness", "contrast", "color"):
        factors = [1.0 + sign * strength * ranges.factor if operation == name else 1.0 for name in _FACTORS]
        return recoloured(image, *factors)
    shear = sign * strength * ranges.shear
    match operation:
        case "posterize":
            return image & np.uint8(256 - (1 << round(strength * ranges.bits)))
        case "solarize":
            return np.where(image >= 255 * (1 - strength), 255 - image, image)
        case "sharpness":
            return _sharpened(image, 1.0 + sign * strength * ranges.factor)
        case "rotate":
            angle = math.radians(sign * strength * ranges.degrees)
            return _moved(image, math.cos(angle), math.sin(angle), -math.sin(angle), math.cos(angle))
        case "shear_x":
            return _moved(image, 1.0, shear, 0.0, 1.0)
        case "shear_y":
            return _moved(image, 1.0, 0.0, shear, 1.0)
        case "translate_x":
            return _moved(image, 1.0, 0.0, 0.0, 1.0, dx=sign * strength * (ranges.pixels + ranges.side_share * width))
        case "translate_y":
            return _moved(image, 1.0, 0.0, 0.0, 1.0, dy=sign * strength * (ranges.pixels + ranges.side_share * height))
    assert operation == "identity"
    return image


def _by_channel(image: Pixels, table_of: Callable[[Pixels], NDArray[np.uint8]]) -> Pixels:
    return np.stack([table_of(image[..., c])[image[..., c]] for c in range(image.shape[2])], axis=-1)


def _stretching(channel: Pixels) -> NDArray[np.uint8]:
    """The smallest value becomes 0, the largest 255."""
    low, high = int(channel.min()), int(channel.max())
    values = np.arange(256)
    return np.clip((values - low) * 255 // max(1, high - low), 0, 255).astype(np.uint8) if high > low else _same()


def _equalizing(channel: Pixels) -> NDArray[np.uint8]:
    """Every value becomes as frequent as the others, as far as whole numbers allow."""
    counts = np.bincount(channel.reshape(-1), minlength=256)
    step = (channel.size - int(counts[int(channel.max())])) // 255
    if step == 0:
        return _same()
    below = np.cumsum(counts) - counts
    table: NDArray[np.uint8] = np.minimum((below + step // 2) // step, 255).astype(np.uint8)
    return table


def _same() -> NDArray[np.uint8]:
    return np.arange(256, dtype=np.uint8)


def _sharpened(image: Pixels, factor: float) -> NDArray[np.generic]:
    """Blends the image with its smoothed self; the border is not smoothed."""
    wide = image.astype(np.int32)
    rows = wide[:-2] + wide[1:-1] + wide[2:]
    around = rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:] + (_SMOOTH_CENTRE - 1) * wide[1:-1, 1:-1]
    smooth = image.astype(np.float32)
    smooth[1:-1, 1:-1] = (2 * around + _SMOOTH_SUM) // (2 * _SMOOTH_SUM)
    return np.clip(np.rint(smooth + np.float32(factor) * (wide - smooth)), 0, 255)


def _moved(image: Pixels, xx: float, xy: float, yx: float, yy: float, dx: float = 0.0, dy: float = 0.0) -> Pixels:
    """Pixel p, counted from the centre, shows what was at matrix p + d."""
    height, width, channels = image.shape
    x0, y0 = width / 2, height / 2
    matrix = (xx, xy, x0 - xx * x0 - xy * y0 + dx, yx, yy, y0 - yx * x0 - yy * y0 + dy)
    pil = Image.fromarray(image[:, :, 0] if channels == 1 else image)
    moved = pil.transform((width, height), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
    return np.asarray(moved).reshape(image.shape)


_TABLES: dict[str, Callable[[Pixels], NDArray[np.uint8]]] = {"auto_contrast": _stretching, "equalize": _equalizing}
_FACTORS = ("brightness", "contrast", "color")
OPERATIONS = (
    *("identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "color", "contrast"),
    *("sharpness", "posterize", "solarize", "auto_contrast", "equalize"),
)
