"""Images of every kind that the decoders must cope with, and the slow way to decode a part of one."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from megabatch.data.jpeg import Box

ORIENTATION = 0x0112


def photograph(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """Smooth shapes with edges and noise: an image on which decoders can differ."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / rng.uniform(3, 30) + y / rng.uniform(3, 30) + rng.uniform(0, 6)) for _ in range(3)]
    pixels = 127 + 90 * np.stack(waves, axis=2) + 60 * ((x // 17 + y // 11) % 2)[..., None] - 30
    noisy: NDArray[np.uint8] = np.clip(pixels + rng.normal(0, 8, pixels.shape), 0, 255).astype(np.uint8)
    return noisy


def encoded(pixels: NDArray[np.uint8] | Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    out = io.BytesIO()
    image.save(out, kind, **({"quality": 90} if kind == "JPEG" else {}) | options)
    return out.getvalue()


def turned(pixels: NDArray[np.uint8], orientation: int) -> bytes:
    """A JPEG with an EXIF note that asks for turning."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return encoded(pixels, exif=exif)


def reference(content: bytes, box: Box, mirror: bool, size: tuple[int, int]) -> NDArray[np.uint8]:
    """What torchvision's reference pipeline does with Pillow: decode all, cut, scale, mirror."""
    with Image.open(io.BytesIO(content)) as image:
        upright = ImageOps.exif_transpose(image).convert("RGB")
    scaled = upright.crop(box).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return np.asarray(ImageOps.mirror(scaled) if mirror else scaled)


def random_box(rng: np.random.Generator, height: int, width: int) -> Box:
    box_width, box_height = int(rng.integers(1, width + 1)), int(rng.integers(1, height + 1))
    left, top = int(rng.integers(0, width - box_width + 1)), int(rng.integers(0, height - box_height + 1))
    return left, top, left + box_width, top + box_height
