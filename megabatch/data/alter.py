"""Changes of colour, angle and noise, after the crop: the list of Mikami 2018, section 4 (rotation, brightness,
contrast, noise), and saturation as in the usual colour jitter.

For a pixel x = (r, g, b), with factors drawn for each image: brightness multiplies x; contrast blends with the
image's mean grey; saturation blends with the pixel's own grey (ITU-R 601-2). The three are one affine map of the
pixel, rounded and cut to 0 .. 255 once. Then the image is turned about its centre, corners black, and noise is added.
All of it is a pure function of the image's draws.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from megabatch.data.augment import ALTER_DRAWS, Augmentation
from megabatch.data.keyed import hashed

__all__ = ["alter"]

LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)
_BYTES_PER_NORMAL = 4
_NORMAL_MEAN = _BYTES_PER_NORMAL * 127.5
_NORMAL_STD = (_BYTES_PER_NORMAL * (256**2 - 1) / 12) ** 0.5


def alter(images: NDArray[np.uint8], policy: Augmentation, uniforms: NDArray[np.float64]) -> None:
    """Changes the images, [n, height, width, channels], in place.

    Columns of `uniforms`, [n, ALTER_DRAWS]: brightness, contrast, saturation, angle, key of the noise.
    """
    assert uniforms.shape[1] == ALTER_DRAWS
    for image, draws in zip(images, uniforms, strict=True):
        brightness, contrast, saturation = (
            1.0 + strength * (2.0 * float(draw) - 1.0)
            for strength, draw in zip((policy.brightness, policy.contrast, policy.saturation), draws, strict=False)
        )
        if policy.brightness or policy.contrast or policy.saturation:
            image[:] = _recoloured(image, brightness, contrast, saturation)
        if policy.rotation_degrees:
            image[:] = _turned(image, policy.rotation_degrees * (2.0 * float(draws[3]) - 1.0))
        if policy.noise_std:
            noisy = image + _normals(image.size, float(draws[4])).reshape(image.shape) * np.float32(policy.noise_std)
            image[:] = np.clip(np.rint(noisy), 0, 255)


def _recoloured(image: NDArray[np.uint8], brightness: float, contrast: float, saturation: float) -> NDArray[np.float32]:
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


def _turned(image: NDArray[np.uint8], degrees: float) -> NDArray[np.uint8]:
    pil = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
    return np.asarray(pil.rotate(degrees, Image.Resampling.BILINEAR)).reshape(image.shape)


def _normals(count: int, key: float) -> NDArray[np.float32]:
    """Numbers of mean 0 and variance 1, nearly normal: sums of four random bytes."""
    words = hashed(int(key * 2**53), -(-count * _BYTES_PER_NORMAL // 8))
    sums = words.view(np.uint8).reshape(-1, _BYTES_PER_NORMAL)[:count].sum(axis=1, dtype=np.float32)
    normals: NDArray[np.float32] = (sums - np.float32(_NORMAL_MEAN)) / np.float32(_NORMAL_STD)
    return normals
