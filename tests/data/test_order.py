"""The order of images against an independent Philox, and its properties as a permutation and a stream."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabatch.data.order import epoch_order, stream

_MASK = 2**64 - 1


def philox_keys(seed: int, epoch: int, count: int) -> list[int]:
    """Philox4x64-10 by its definition (Salmon 2011), in Python's own integers; blocks are numbered from 1."""
    keys: list[int] = []
    block = 0
    while len(keys) < count:
        block += 1
        c0, c1, c2, c3 = block, 0, 0, 0
        k0, k1 = seed, epoch
        for _ in range(10):
            high0, low0 = divmod(0xD2E7470EE14C6C93 * c0, 2**64)
            high1, low1 = divmod(0xCA5A826395121157 * c2, 2**64)
            c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
            k0, k1 = (k0 + 0x9E3779B97F4A7C15) & _MASK, (k1 + 0xBB67AE8584CAA73B) & _MASK
        keys += [c0, c1, c2, c3]
    return keys[:count]


@pytest.mark.parametrize(("seed", "epoch", "count"), [(0, 0, 10), (0, 1, 10), (1, 0, 10), (2**63 - 1, 89, 101)])
def test_the_order_sorts_images_by_philox_keys(seed: int, epoch: int, count: int) -> None:
    keys = philox_keys(seed, epoch, count)
    assert epoch_order(seed, epoch, count).tolist() == sorted(range(count), key=keys.__getitem__)


def test_golden_orders() -> None:
    """These never change: a run resumed with a later version must see the same images in the same order."""
    assert epoch_order(0, 0, 10).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert epoch_order(0, 1, 10).tolist() == [5, 3, 7, 8, 2, 4, 1, 0, 6, 9]
    assert epoch_order(7, 0, 10).tolist() == [8, 4, 1, 6, 3, 2, 7, 5, 9, 0]


@given(st.integers(0, 2**63 - 1), st.integers(0, 10_000), st.integers(1, 300))
def test_every_epoch_is_a_permutation(seed: int, epoch: int, count: int) -> None:
    order = epoch_order(seed, epoch, count)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(count))


def test_seeds_and_epochs_give_unlike_orders() -> None:
    orders = {tuple(epoch_order(seed, epoch, 50).tolist()) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    # Swapping seed and epoch is another order too.
    assert epoch_order(1, 2, 50).tolist() != epoch_order(2, 1, 50).tolist()


def test_a_place_in_the_order_does_not_favour_any_image() -> None:
    """Chi-squared of the first place over 2000 epochs and 10 images: 9 degrees of freedom, 33.7 has odds 1 : 10^4."""
    firsts = np.bincount([epoch_order(3, epoch, 10)[0] for epoch in range(2000)], minlength=10)
    assert ((firsts - 200.0) ** 2 / 200.0).sum() < 33.7


def test_nobody_can_change_the_order_for_others() -> None:
    with pytest.raises(ValueError, match="read-only"):
        epoch_order(0, 0, 10)[0] = 5


@given(st.integers(1, 30), st.integers(0, 100), st.integers(0, 70))
def test_a_stream_is_the_epochs_laid_end_to_end(num_samples: int, start: int, count: int) -> None:
    long = [(epoch, sample) for epoch in range(180 // num_samples + 1) for sample in epoch_order(5, epoch, num_samples)]
    epochs, samples = stream(5, num_samples, start, count)
    assert epochs.dtype == samples.dtype == np.int64
    assert list(zip(epochs.tolist(), samples.tolist(), strict=True)) == long[start : start + count]
