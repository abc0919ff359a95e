"""The order of training images and the random numbers of each: pure functions of (seed, epoch, sample).

Each epoch's order sorts the images by 64-bit Philox keys. Only Philox's raw output is used, which numpy keeps
stable for ever, whereas the streams behind `permutation` and `shuffle` may change between its versions.

The random numbers of a sample are counter-based: four nested SplitMix64 streams (Steele, Lea and Flood 2014, "Fast
splittable pseudorandom number generators"). With `out(s, k)` output k = 0, 1, ... of SplitMix64 started at s:

    bits(seed, epoch, sample, draw) = out(out(out(out(seed, 0), epoch), sample), draw)

Every output can be computed alone, by 64-bit integer arithmetic only, so a sample gets the same draws in
any batch, on any rank, on any platform and with any version of numpy.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Floats",
    "Ints",
    "epoch_order",
    "keyed_bits",
    "keyed_uniforms",
    "sample_stream",
    "splitmix64",
]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_MASK = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_ONE, _SHIFT_11, _SHIFT_27, _SHIFT_30, _SHIFT_31 = (np.uint64(k) for k in (1, 11, 27, 30, 31))


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, num_samples: int) -> Ints:
    """The order of all images in one epoch, as a permutation of 0 .. num_samples - 1 (read-only)."""
    keys = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(num_samples)
    # A stable sort makes the order well defined even if two keys are equal.
    order = np.argsort(keys, kind="stable").astype(np.int64, copy=False)
    order.flags.writeable = False
    return order


def sample_stream(seed: int, num_samples: int, start: int, count: int) -> tuple[Ints, Ints]:
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


def keyed_bits(seed: int, epochs: Ints | int, samples: Ints, count: int) -> NDArray[np.uint64]:
    """The first `count` draws of 64 random bits for each sample, [n, count]; see the head of this file.

    `seed`, `epochs` (one, or one for each sample) and `samples` are not negative; the seed is below 2**64.
    """
    assert 0 <= seed <= _MASK
    state = _outputs(_seed_state(seed), np.atleast_1d(np.asarray(epochs)).astype(np.uint64))
    state = _outputs(state, samples.astype(np.uint64))
    return _outputs(state[:, None], np.arange(count, dtype=np.uint64))


def keyed_uniforms(seed: int, epochs: Ints | int, samples: Ints, count: int) -> Floats:
    """The first `count` draws for each sample, uniform on [0, 1) in steps of 2**-53, [n, count]."""
    bits = keyed_bits(seed, epochs, samples, count)
    bits >>= _SHIFT_11
    return np.multiply(bits, 2.0**-53, dtype=np.float64)


def splitmix64(key: int, count: int) -> NDArray[np.uint64]:
    """The first `count` outputs of SplitMix64 started at the key, in little-endian byte order."""
    state = np.array([key], dtype=np.uint64)
    return _outputs(state, np.arange(count, dtype=np.uint64)).astype("<u8", copy=False)


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
