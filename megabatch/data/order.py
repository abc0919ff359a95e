"""The global order of training images: a pure function of (seed, epoch), the same on every worker.

Each epoch's order sorts the images by 64-bit Philox keys. Only Philox's raw output is used, which numpy keeps
stable for ever, whereas the streams behind `permutation` and `shuffle` may change between its versions.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["epoch_order", "stream"]


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, num_samples: int) -> NDArray[np.int64]:
    """The order of all images in one epoch, as a permutation of 0 .. num_samples - 1 (read-only)."""
    keys = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(num_samples)
    # A stable sort makes the order well defined even if two keys are equal.
    order = np.argsort(keys, kind="stable").astype(np.int64, copy=False)
    order.flags.writeable = False
    return order


def stream(seed: int, num_samples: int, start: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Images `start` to `start + count` of all epochs laid end to end, as (epoch, sample) for each of them."""
    epochs = np.empty(count, dtype=np.int64)
    samples = np.empty(count, dtype=np.int64)
    done = 0
    while done < count:
        epoch, position = divmod(start + done, num_samples)
        take = min(count - done, num_samples - position)
        epochs[done : done + take] = epoch
        samples[done : done + take] = epoch_order(seed, epoch, num_samples)[position : position + take]
        done += take
    return epochs, samples
