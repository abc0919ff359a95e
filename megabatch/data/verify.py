"""Decodes every image of a set, lists the broken ones, counts the classes: what should be known before a long run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megabatch.data.broken_images import Broken
from megabatch.data.sources import Source, image_name
from megabatch.errors import DataError

__all__ = ["Findings", "verify"]

_CHUNK_IMAGES = 64


@dataclass(frozen=True)
class Findings:
    """What a look at every image brought. Sizes are height x width."""

    num_images: int
    class_counts: NDArray[np.int64]
    smallest: tuple[int, int]
    largest: tuple[int, int]
    broken: tuple[Broken, ...]

    @property
    def empty_classes(self) -> list[int]:
        return np.flatnonzero(self.class_counts == 0).tolist()


def verify(source: Source, jobs: int, progress: Callable[[int], None] = lambda count: None) -> Findings:
    """Decode all images by `jobs` threads; `progress` hears how many were done."""

    def look(start: int) -> tuple[list[tuple[int, int]], list[Broken]]:
        sizes, broken = [], []
        for index in range(start, min(start + _CHUNK_IMAGES, len(source))):
            try:
                height, width, _ = source.read(index).shape
                sizes.append((height, width))
            except DataError as error:
                broken.append(Broken(index, image_name(source, index), str(error)))
        return sizes, broken

    smallest, largest, all_broken = (2**31, 2**31), (0, 0), list[Broken]()
    with ThreadPoolExecutor(jobs) as pool:
        for sizes, broken in pool.map(look, range(0, len(source), _CHUNK_IMAGES)):
            all_broken += broken
            for size in sizes:
                smallest = min(smallest, size, key=lambda s: s[0] * s[1])
                largest = max(largest, size, key=lambda s: s[0] * s[1])
            progress(len(sizes) + len(broken))
    counts = np.bincount(source.labels, minlength=source.num_classes)
    if not largest[0]:
        smallest = largest
    return Findings(len(source), counts, smallest, largest, tuple(all_broken))
