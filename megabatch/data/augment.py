"""Random changes of training images: crops, flips, colour, angle and noise. All of it is a pure function of the draws.

Resized crops follow Szegedy et al. 2015, "Going deeper with convolutions", section 6: a share of the area and an
aspect ratio, drawn until the crop fits.

Colour, angle and noise come after the crop: the list of Mikami 2018, section 4 (rotation, brightness, contrast, noise),
and saturation as in the usual colour jitter. For a pixel x = (r, g, b), with factors drawn for each image: brightness
multiplies x; contrast blends with the image's mean grey; saturation blends with the pixel's own grey (ITU-R 601-2). The
three are one affine map of the pixel, rounded and cut to 0 .. 255 once. Then the image is turned about its centre,
corners black, and noise is added. At last a box may be erased. `megabatch.data.policy` has the operations of
RandAugment and TrivialAugment, which come right after the crop, `megabatch.data.mix` mixes the images of a ghost batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from megabatch.data.jpeg import Box, Pixels
from megabatch.data.randomness import Floats, Ints, splitmix64

Crop = Literal["none", "pad", "resized"]
Policy = Literal["none", "trivial", "rand"]
CROP_TRIES = 10
DRAWS_PER_TRY = 4  # area, aspect, top, left
DISTORT_DRAWS = 5  # brightness, contrast, saturation, angle, key of the noise
ERASE_DRAWS = 5  # whether, area, aspect, top, left
OPERATION_DRAWS = 3  # which, strength, sign
MIX_DRAWS = 4  # which kind, share, top, left

LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)
_BYTES_PER_NORMAL = 4
_NORMAL_MEAN = _BYTES_PER_NORMAL * 127.5
_NORMAL_STD = (_BYTES_PER_NORMAL * (256**2 - 1) / 12) ** 0.5


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Which random changes a training image gets; the settings' `AugmentConfig` has checked the values.

    `pad` surrounds the image with `padding` black pixels and cuts the original size out of it; `resized`
    cuts a box of random area (a share of the image's) and aspect (width / height) and scales it; with `side_share` s
    above 0 the box is always a square of s times the shorter side, and only its place is random.
    `brightness`, `contrast` and `saturation` s draw a factor from 1 - s to 1 + s; `rotation_degrees` d an angle from
    -d to d; `noise_std` is in grey levels; `erase` is the share of images that lose a box. `policy` "trivial" makes
    one random operation on each image, "rand" `rand_ops` of them at `rand_magnitude` of 30. `mixup` and `cutmix`, when
    above 0, are the alpha of a beta distribution for the share of an image in its mixture with the next one.
    Being a frozen value, it may be another one from one step to the next.
    """

    crop: Crop = "none"
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
    erase: float = 0.0
    policy: Policy = "none"
    rand_ops: int = 2
    rand_magnitude: int = 9
    mixup: float = 0.0
    cutmix: float = 0.0

    @property
    def mixes(self) -> bool:
        """Whether the images of a ghost batch are mixed with each other."""
        return bool(self.mixup or self.cutmix)

    @property
    def num_operations(self) -> int:
        """Operations of the policy on each image."""
        return {"none": 0, "trivial": 1, "rand": self.rand_ops}[self.policy]

    @property
    def distorts(self) -> bool:
        """Whether colours, angle or noise are changed after the crop."""
        return bool(self.brightness or self.contrast or self.saturation or self.rotation_degrees or self.noise_std)

    @property
    def num_crop_draws(self) -> int:
        """Random numbers for flip (the first) and crop."""
        return 1 + {"none": 0, "pad": 2, "resized": CROP_TRIES * DRAWS_PER_TRY}[self.crop]

    @property
    def num_draws(self) -> int:
        """Random numbers one image needs, with those for mixing."""
        stop: int = self.draws_of("mix").stop
        return stop

    def draws_of(self, part: Literal["crop", "distort", "erase", "policy", "mix"]) -> slice:
        """Which of an image's random numbers a part takes; they lie in this order, and a part that is off has none."""
        counts = {
            "crop": self.num_crop_draws,
            "distort": DISTORT_DRAWS if self.distorts else 0,
            "erase": ERASE_DRAWS if self.erase else 0,
            "policy": OPERATION_DRAWS * self.num_operations,
            "mix": MIX_DRAWS if self.mixes else 0,
        }
        names = list(counts)
        start = sum(counts[name] for name in names[: names.index(part)])
        return slice(start, start + counts[part])


def pad_crop_flip(images: Pixels, padding: int, flip: bool, uniforms: Floats) -> Pixels:
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
        chosen = uniforms[:, 0] < 0.5
        moved[chosen] = moved[chosen, :, ::-1]
    return moved


def resized_crop_box(height: int, width: int, policy: Augmentation, uniforms: Floats) -> Box:
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


def distort(images: Pixels, policy: Augmentation, uniforms: Floats) -> None:
    """Changes the images, [n, height, width, channels], in place.

    Columns of `uniforms`, [n, DISTORT_DRAWS]: brightness, contrast, saturation, angle, key of the noise.
    """
    assert uniforms.shape[1] == DISTORT_DRAWS
    for image, draws in zip(images, uniforms, strict=True):
        brightness, contrast, saturation = (
            1.0 + strength * (2.0 * float(draw) - 1.0)
            for strength, draw in zip((policy.brightness, policy.contrast, policy.saturation), draws, strict=False)
        )
        if policy.brightness or policy.contrast or policy.saturation:
            image[:] = recoloured(image, brightness, contrast, saturation)
        if policy.rotation_degrees:
            image[:] = _turned(image, policy.rotation_degrees * (2.0 * float(draws[3]) - 1.0))
        if policy.noise_std:
            noisy = image + _normals(image.size, float(draws[4])).reshape(image.shape) * np.float32(policy.noise_std)
            image[:] = np.clip(np.rint(noisy), 0, 255)


def erase(images: Pixels, share: float, uniforms: Floats) -> None:
    """Paints a box over with the image's mean colour, in `share` of the images, in place.

    Zhong et al. 2017, "Random erasing data augmentation": 2 to 33 % of the area, height / width from 0.3 to 1 / 0.3,
    uniform in its logarithm; a box that is longer than the image is cut to it. Columns of `uniforms`, [n, ERASE_DRAWS].
    """
    height, width = images.shape[1:3]
    for image, draws in zip(images, uniforms.tolist(), strict=True):
        whether, for_area, for_aspect, for_top, for_left = draws
        if whether >= share:
            continue
        area, aspect = height * width * (0.02 + 0.31 * for_area), 0.3 * (1 / 0.09) ** for_aspect
        box_height = min(height, max(1, round((area * aspect) ** 0.5)))
        box_width = min(width, max(1, round((area / aspect) ** 0.5)))
        top, left = int(for_top * (height - box_height + 1)), int(for_left * (width - box_width + 1))
        mean = image.reshape(-1, image.shape[2]).sum(axis=0, dtype=np.int64) // (height * width)
        image[top : top + box_height, left : left + box_width] = mean


def recoloured(image: Pixels, brightness: float, contrast: float, saturation: float) -> NDArray[np.float32]:
    """The image with these factors, in whole numbers from 0 to 255."""
    # Number by number, not as a matrix product: those are rounded differently by different libraries.
    changed = image.astype(np.float32)
    grey = changed
    if image.shape[2] == 3:
        red, green, blue = (changed[..., [c]] * LUMA[c] for c in range(3))
        grey = red + green + blue
    mean_grey = float(grey.mean(dtype=np.float64))
    if saturation != 1.0 and image.shape[2] == 3:
        changed *= np.float32(saturation)
        changed += np.float32(1.0 - saturation) * grey
    changed *= np.float32(brightness * contrast)
    changed += np.float32((1.0 - contrast) * brightness * mean_grey)
    clipped: NDArray[np.float32] = np.clip(np.rint(changed, out=changed), 0, 255, out=changed)
    return clipped


def _turned(image: Pixels, degrees: float) -> Pixels:
    pil = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
    return np.asarray(pil.rotate(degrees, Image.Resampling.BILINEAR)).reshape(image.shape)


def _normals(count: int, key: float) -> NDArray[np.float32]:
    """Numbers of mean 0 and variance 1, nearly normal: sums of four random bytes."""
    words = splitmix64(int(key * 2**53), -(-count * _BYTES_PER_NORMAL // 8))
    sums = words.view(np.uint8).reshape(-1, _BYTES_PER_NORMAL)[:count].sum(axis=1, dtype=np.float32)
    normals: NDArray[np.float32] = (sums - np.float32(_NORMAL_MEAN)) / np.float32(_NORMAL_STD)
    return normals


def _cut_windows(canvas: Pixels, height: int, width: int, *, tops: Ints, lefts: Ints) -> Pixels:
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
    images: Pixels = windows.view(np.uint8).reshape(num_images, height, width, channels)
    return images
