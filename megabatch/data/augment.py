"""Random crops and flips of training images: what is drawn, and what the draws mean.

Resized crops follow Szegedy et al. 2015, "Going deeper with convolutions", section 6: a share of the area and an
aspect ratio, drawn until the crop fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megabatch.data.geometry import Box
from megabatch.errors import ConfigError

__all__ = [
    "ALTER_DRAWS",
    "CROP_TRIES",
    "Augmentation",
    "flip_where",
    "pad_crop_flip",
    "resized_crop_box",
]

CROP_TRIES = 10
DRAWS_PER_TRY = 4  # area, aspect, top, left
ALTER_DRAWS = 5  # brightness, contrast, saturation, angle, key of the noise


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Which random changes a training image gets; the values are checked on construction.

    `pad` surrounds the image with `padding` black pixels and cuts the original size out of it; `resized`
    cuts a box of random area (a share of the image's) and aspect (width / height) and scales it; with `side_share` s
    above 0 the box is always a square of s times the shorter side, and only its place is random.
    `brightness`, `contrast` and `saturation` s draw a factor from 1 - s to 1 + s; `rotation_degrees` d an angle from
    -d to d; `noise_std` is in grey levels. Being a frozen value, it may be another one from one step to the next.
    """

    crop: Literal["none", "pad", "resized"] = "none"
    padding: int = 0
    flip: bool = False
    area_min: float = 0.08
    area_max: float = 1.0
    aspect_min: float = 3 / 4
    aspect_max: float = 4 / 3
    side_share: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    rotation_degrees: float = 0.0
    noise_std: float = 0.0

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

        for name in ("brightness", "contrast", "saturation", "side_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"augmentation {name} is {getattr(self, name)}; it must be a share from 0 to 1")
        if not 0 <= self.rotation_degrees <= 180 or not 0 <= self.noise_std <= 255:
            raise ConfigError(
                f"augmentation rotation is {self.rotation_degrees} degrees and noise {self.noise_std} grey levels; "
                "they must be from 0 to 180 and from 0 to 255"
            )

    @property
    def alters(self) -> bool:
        """Whether colours, angle or noise are changed after the crop."""
        return bool(self.brightness or self.contrast or self.saturation or self.rotation_degrees or self.noise_std)

    @property
    def num_crop_draws(self) -> int:
        """Random numbers for flip (the first) and crop."""
        return 1 + {"none": 0, "pad": 2, "resized": CROP_TRIES * DRAWS_PER_TRY}[self.crop]

    @property
    def num_draws(self) -> int:
        """Random numbers one image needs: flip, crop, then the changes of `megabatch.data.alter`."""
        return self.num_crop_draws + (ALTER_DRAWS if self.alters else 0)


def pad_crop_flip(
    images: NDArray[np.uint8], padding: int, flip: bool, uniforms: NDArray[np.float64]
) -> NDArray[np.uint8]:
    """A new array of the images [n, height, width, channels], each moved by up to `padding` and flipped.

    Columns of `uniforms` ([n, 3], or [n, 1] when `padding` is 0): flip (mirrored left to right when below 1/2
    and `flip` is set), top, left. The image is padded with zeros and cut at floor(u * (2 * padding + 1)).
    """
    num_images, height, width, channels = images.shape
    if padding == 0:
        moved = images.copy()
    else:
        canvas = np.zeros((num_images, height + 2 * padding, width + 2 * padding, channels), dtype=np.uint8)
        canvas[:, padding : padding + height, padding : padding + width] = images
        offsets = (uniforms[:, 1:3] * (2 * padding + 1)).astype(np.int64)
        moved = _cut_windows(canvas, height, width, tops=offsets[:, 0], lefts=offsets[:, 1])
    if flip:
        flip_where(moved, uniforms[:, 0] < 0.5)
    return moved


def flip_where(images: NDArray[np.uint8], chosen: NDArray[np.bool_]) -> None:
    """Mirrors the chosen images of [n, height, width, channels] left to right, in place."""
    images[chosen] = images[chosen, :, ::-1]


def resized_crop_box(height: int, width: int, policy: Augmentation, uniforms: NDArray[np.float64]) -> Box:
    """The box of a random resized crop inside an image of `height` x `width`.

    `uniforms` holds CROP_TRIES times (area, aspect, top, left). The area is uniform, the aspect uniform in
    its logarithm. The first try that fits is taken; if none does, the largest centred box within the limits
    of the aspect.
    """
    assert uniforms.shape == (CROP_TRIES * DRAWS_PER_TRY,)
    draws: list[float] = uniforms.tolist()
    if policy.side_share:
        side = max(1, round(policy.side_share * min(height, width)))
        top, left = int(draws[2] * (height - side + 1)), int(draws[3] * (width - side + 1))
        return left, top, left + side, top + side
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


def _cut_windows(
    canvas: NDArray[np.uint8], height: int, width: int, *, tops: NDArray[np.int64], lefts: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """A window of height x width out of each image of a C-contiguous canvas [n, h, w, channels]."""
    num_images, canvas_height, canvas_width, channels = canvas.shape
    # A row of a window is a run of bytes. Seeing the canvas as overlapping runs, one starting at each pixel,
    # makes the cut one gather of num_images * height runs, three times faster than a loop over images.
    runs: NDArray[np.void] = np.ndarray(
        (num_images, canvas_height, canvas_width - width + 1),
        dtype=np.dtype((np.void, width * channels)),
        buffer=canvas.data,
        strides=canvas.strides[:3],
    )
    rows = tops[:, None] + np.arange(height)
    windows = runs[np.arange(num_images)[:, None], rows, lefts[:, None]]
    images: NDArray[np.uint8] = windows.view(np.uint8).reshape(num_images, height, width, channels)
    return images
