"""Mean and standard deviation of the pixels of a set, measured on a fixed part of it and cached.

At most 2,000 images, with the set's mix of classes, are fitted to the image size as in evaluation. The same images give
the same numbers on every rank. The cache knows a set by its labels and by the bytes of a few of its images.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megabatch.data.batches import fit
from megabatch.data.sources import Source, mixed_order
from megabatch.errors import DataError
from megabatch.files import default_cache, parse_json, read_text, write_json
from megabatch.machine import usable_cores

MEASURED_IMAGES = 2_000
_KNOWN_BY_IMAGES = 32


@dataclass(frozen=True)
class PixelStatistics:
    """Per channel, of pixels from 0 to 1; rounded, so that they can be typed again."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_images: int
    is_cached: bool = False


def measure_pixels(source: Source, image_size: int) -> PixelStatistics:
    """Measure now; images that cannot be read are passed over.

    Raises:
        DataError: no image can be read, or all pixels of a channel are equal.
    """

    def count_values(index: int) -> NDArray[np.int64] | DataError:
        """How often each of the 256 values occurs, by channel."""
        try:
            pixels = fit(source.read(index), image_size).reshape(-1, source.channels)
        except DataError as error:
            return error
        return np.stack([np.bincount(pixels[:, channel], minlength=256) for channel in range(source.channels)])

    with ThreadPoolExecutor(min(16, usable_cores())) as pool:  # decoding holds no interpreter lock
        found = list(pool.map(count_values, mixed_order(source.labels)[:MEASURED_IMAGES].tolist()))
    counts = [one for one in found if not isinstance(one, DataError)]
    num_images = len(counts)
    if not counts:
        raise DataError(f"none of the images of {source.name} can be read; the last: {found[-1]}")
    total = np.sum(counts, axis=0)
    shares = total / total.sum(axis=1, keepdims=True)
    values = np.arange(256) / 255.0
    mean = shares @ values
    std = np.sqrt(np.maximum(shares @ values**2 - mean**2, 0.0))
    if not (std > 5e-4).all():
        raise DataError(f"the images of {source.name} have one colour only; give images that show something")
    return PixelStatistics(tuple(mean.round(3).tolist()), tuple(std.round(3).tolist()), num_images)


def cached_pixels(source: Source, image_size: int, folder: Path | None = None) -> PixelStatistics:
    """What `measure_pixels` finds, or found before for the same set; `folder`: of the cache."""
    place = (folder or default_cache() / "pixels") / f"{_key(source, image_size)}.json"
    try:
        table = parse_json(read_text(place))
        return PixelStatistics(tuple(table["mean"]), tuple(table["std"]), int(table["num_images"]), is_cached=True)
    except (OSError, ValueError, KeyError, TypeError):
        found = measure_pixels(source, image_size)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_json(place, {"mean": list(found.mean), "std": list(found.std), "num_images": found.num_images})
    except OSError:
        pass  # measured again the next time
    return found


def _key(source: Source, image_size: int) -> str:
    digest = hashlib.sha256(f"{image_size} {source.channels}".encode())
    digest.update(source.labels.tobytes())
    for index in mixed_order(source.labels)[:_KNOWN_BY_IMAGES].tolist():
        try:
            digest.update(source.read_bytes(index) or source.read(index).tobytes())
        except DataError:
            continue
    return digest.hexdigest()[:32]
