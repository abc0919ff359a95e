"""Random crops and flips of training pictures, keyed by (seed, epoch, sample) and by nothing else.

The randomness is counter-based: four nested SplitMix64 streams (Steele, Lea and Flood 2014, "Fast splittable
pseudorandom number generators"). With `out(s, k)` the k-th output, k = 0, 1, ..., of SplitMix64 started at s:

    bits(seed, epoch, sample, draw) = out(out(out(out(seed, 0), epoch), sample), draw)

Every output can be computed alone, by 64-bit integer arithmetic only, so a sample gets the same draws in
any batch, on any worker, on any platform and with any version of numpy. Resized crops follow Szegedy et al.
2015, "Going deeper with convolutions", section 6: a share of the area and an aspect ratio, drawn until the
crop fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from megabatch.errors import ConfigError

__all__ = [
    "CROP_TRIES",
    "Augmentation",
    "Box",
    "flip_where",
    "keyed_bits",
    "keyed_uniforms",
    "pad_crop_flip",
    "resize",
    "resized_crop_box",
]

Box = tuple[int, int, int, int]  # left, top, right, bottom, in pixels, as Pillow has it

CROP_TRIES = 10
DRAWS_PER_TRY = 4  # area, aspect, top, left

_MASK = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_ONE, _SHIFT_11, _SHIFT_27, _SHIFT_30, _SHIFT_31 = (np.uint64(k) for k in (1, 11, 27, 30, 31))


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Which random changes a training picture gets; the values are checked on construction.

    `pad` surrounds the picture with `padding` black pixels and cuts the original size out of it; `resized`
    cuts a box of random area (a share of the picture's) and aspect (width / height) and scales it.
    """

    crop: Literal["none", "pad", "resized"] = "none"
    padding: int = 0
    flip: bool = False
    area_min: float = 0.08
    area_max: float = 1.0
    aspect_min: float = 3 / 4
    aspect_max: float = 4 / 3

    def __post_init__(self) -> None:
        if self.crop not in ("none", "pad", "resized"):
            raise ConfigError(f"augmentation crop is '{self.crop}'; it must be none, pad or resized")
        if self.padding < 0:
            raise ConfigError(f"augmentation padding is {self.padding}; it must be 0 or more pixels")
        if not 0 < self.area_min <= self.area_max <= 1:
            raise ConfigError(
                f"augmentation area is {self.area_min} to {self.area_max}; "
                "it must be a rising range of shares above 0 and up to 1"
            )
        if not 0 < self.aspect_min <= self.aspect_max < float("inf"):
            raise ConfigError(
                f"augmentation aspect is {self.aspect_min} to {self.aspect_max}; "
                "it must be a rising range of finite ratios above 0"
            )

    @property
    def num_draws(self) -> int:
        """Random numbers one picture needs: one for the flip, then those of the crop."""
        return 1 + {"none": 0, "pad": 2, "resized": CROP_TRIES * DRAWS_PER_TRY}[self.crop]


def keyed_bits(
    seed: int, epochs: NDArray[np.int64] | int, samples: NDArray[np.int64], count: int
) -> NDArray[np.uint64]:
    """The first `count` draws of 64 random bits for each sample, [n, count]; see the head of this file.

    `seed`, `epochs` (one, or one for each sample) and `samples` are not negative; the seed is below 2**64.
    """
    assert 0 <= seed <= _MASK
    state = _outputs(_seed_state(seed), np.atleast_1d(np.asarray(epochs)).astype(np.uint64))
    state = _outputs(state, samples.astype(np.uint64))
    return _outputs(state[:, None], np.arange(count, dtype=np.uint64))


def keyed_uniforms(
    seed: int, epochs: NDArray[np.int64] | int, samples: NDArray[np.int64], count: int
) -> NDArray[np.float64]:
    """The first `count` draws for each sample, uniform on [0, 1) in steps of 2**-53, [n, count]."""
    bits = keyed_bits(seed, epochs, samples, count)
    bits >>= _SHIFT_11
    return np.multiply(bits, 2.0**-53, dtype=np.float64)


def pad_crop_flip(
    pictures: NDArray[np.uint8], padding: int, flip: bool, uniforms: NDArray[np.float64]
) -> NDArray[np.uint8]:
    """A new array of the pictures [n, height, width, channels], each moved by up to `padding` and flipped.

    Columns of `uniforms` ([n, 3], or [n, 1] when `padding` is 0): flip (mirrored left to right when below 1/2
    and `flip` is set), top, left. The picture is padded with zeros and cut at floor(u * (2 * padding + 1)).
    """
    num_pictures, height, width, channels = pictures.shape
    if padding == 0:
        moved = pictures.copy()
    else:
        canvas = np.zeros((num_pictures, height + 2 * padding, width + 2 * padding, channels), dtype=np.uint8)
        canvas[:, padding : padding + height, padding : padding + width] = pictures
        offsets = (uniforms[:, 1:3] * (2 * padding + 1)).astype(np.int64)
        moved = _cut_windows(canvas, height, width, tops=offsets[:, 0], lefts=offsets[:, 1])
    if flip:
        flip_where(moved, uniforms[:, 0] < 0.5)
    return moved


def flip_where(pictures: NDArray[np.uint8], chosen: NDArray[np.bool_]) -> None:
    """Mirrors the chosen pictures of [n, height, width, channels] left to right, in place."""
    pictures[chosen] = pictures[chosen, :, ::-1]


def resized_crop_box(height: int, width: int, policy: Augmentation, uniforms: NDArray[np.float64]) -> Box:
    """The box of a random resized crop inside a picture of `height` x `width`.

    `uniforms` holds CROP_TRIES times (area, aspect, top, left). The area is uniform, the aspect uniform in
    its logarithm. The first try that fits is taken; if none does, the largest centred box within the limits
    of the aspect.
    """
    assert uniforms.shape == (CROP_TRIES * DRAWS_PER_TRY,)
    draws: list[float] = uniforms.tolist()
    for first in range(0, len(draws), DRAWS_PER_TRY):
        for_area, for_aspect, for_top, for_left = draws[first : first + DRAWS_PER_TRY]
        area = height * width * (policy.area_min + (policy.area_max - policy.area_min) * for_area)
        aspect = policy.aspect_min * (policy.aspect_max / policy.aspect_min) ** for_aspect
        box_width, box_height = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
        if 1 <= box_width <= width and 1 <= box_height <= height:
            top = int(for_top * (height - box_height + 1))
            left = int(for_left * (width - box_width + 1))
            return left, top, left + box_width, top + box_height
    box_width = min(width, max(1, round(height * policy.aspect_max)))
    box_height = min(height, max(1, round(width / policy.aspect_min)))
    left, top = (width - box_width) // 2, (height - box_height) // 2
    return left, top, left + box_width, top + box_height


def resize(picture: NDArray[np.uint8], height: int, width: int, box: Box | None = None) -> NDArray[np.uint8]:
    """A picture [h, w, channels], or a box of it, scaled to height x width: Pillow's antialiased bilinear."""
    image = Image.fromarray(picture[:, :, 0] if picture.shape[2] == 1 else picture)
    scaled = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR, box=box))
    return scaled.reshape(height, width, picture.shape[2])


@lru_cache(maxsize=8)
def _seed_state(seed: int) -> NDArray[np.uint64]:
    """`out(seed, 0)` as an array of one: array arithmetic wraps modulo 2**64 without a warning."""
    return _outputs(np.array([seed], dtype=np.uint64), np.zeros(1, dtype=np.uint64))


def _outputs(states: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`out(state, position)` for broadcast arrays; a new array."""
    mixed = states + (positions + _ONE) * _GOLDEN
    mixed ^= mixed >> _SHIFT_30
    mixed *= _MULTIPLIER_1
    mixed ^= mixed >> _SHIFT_27
    mixed *= _MULTIPLIER_2
    mixed ^= mixed >> _SHIFT_31
    return mixed


def _cut_windows(
    canvas: NDArray[np.uint8], height: int, width: int, *, tops: NDArray[np.int64], lefts: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """A window of height x width out of each picture of a C-contiguous canvas [n, h, w, channels]."""
    num_pictures, canvas_height, canvas_width, channels = canvas.shape
    # A row of a window is a run of bytes. Seeing the canvas as overlapping runs, one starting at each pixel,
    # makes the cut one gather of num_pictures * height runs, three times faster than a loop over pictures.
    runs: NDArray[np.void] = np.ndarray(
        (num_pictures, canvas_height, canvas_width - width + 1),
        dtype=np.dtype((np.void, width * channels)),
        buffer=canvas.data,
        strides=canvas.strides[:3],
    )
    rows = tops[:, None] + np.arange(height)
    windows = runs[np.arange(num_pictures)[:, None], rows, lefts[:, None]]
    pictures: NDArray[np.uint8] = windows.view(np.uint8).reshape(num_pictures, height, width, channels)
    return pictures
