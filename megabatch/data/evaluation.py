"""Validation images, batch by batch, prepared ahead by a few threads; each image once and in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from megabatch.data.assemble import assemble_evaluation
from megabatch.data.broken import Broken
from megabatch.data.feeding import Feeding
from megabatch.data.sources import ImageArray, Source

__all__ = ["evaluation_batches"]

Batch = tuple[NDArray[np.uint8], NDArray[np.int64]]


def evaluation_batches(
    source: Source, image_size: int, begin: int, end: int, images_per_batch: int, feeding: Feeding
) -> Iterator[Batch]:
    """Images `begin` to `end` of the source, fitted, with their labels; at most a batch per thread is kept ahead.

    Raises DataError for a broken image, or when there are more of them than `feeding.broken` allows.
    """
    tolerant = feeding.broken.max_share > 0

    def make(first: int) -> tuple[Batch, list[Broken]]:
        broken: list[Broken] = []
        indices = np.arange(first, min(end, first + images_per_batch))
        report = broken.append if tolerant else None
        return assemble_evaluation(source, image_size, indices, report), broken

    # Images in memory are only copied: threads would have nothing to share.
    num_threads = 1 if isinstance(source, ImageArray) else max(1, feeding.threads, feeding.processes)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="evaluation") as pool:
        starts = iter(range(begin, end, images_per_batch))
        ahead: deque[Future[tuple[Batch, list[Broken]]]] = deque()
        try:
            for first in starts:
                ahead.append(pool.submit(make, first))
                if len(ahead) > num_threads:
                    yield _taken(ahead.popleft(), feeding)
            while ahead:
                yield _taken(ahead.popleft(), feeding)
        finally:
            for future in ahead:
                future.cancel()


def _taken(future: Future[tuple[Batch, list[Broken]]], feeding: Feeding) -> Batch:
    batch, broken = future.result()
    feeding.broken.note(len(batch[1]), broken)
    return batch
