"""mixup and cutmix against a plain loop over pixels, and how shares are spread."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from megabatch.data.augment import MIX_DRAWS, Augmentation
from megabatch.data.mix import mix
from megabatch.data.randomness import keyed_uniforms
from tests.data.images import photograph


def images_and_draws(count: int, size: int = 12) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    images = np.stack([photograph(size, size + 3, seed % 7) + np.uint8(seed) for seed in range(count)])
    return images, keyed_uniforms(5, 2, np.arange(count), MIX_DRAWS)


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_mixup_blends_each_image_with_the_next(alpha: float) -> None:
    before, draws = images_and_draws(9)
    after = before.copy()
    shares = mix(after, Augmentation(mixup=alpha), draws)
    for at in range(9):
        assert 0.5 <= shares[at] <= 1
        drawn = stats.beta.ppf(draws[at, 1], alpha, alpha)
        assert shares[at] == pytest.approx(max(drawn, 1 - drawn), abs=0.5 / 256)
        blend = shares[at] * before[at].astype(float) + (1 - shares[at]) * before[(at + 1) % 9].astype(float)
        assert abs(after[at] - blend).max() <= 0.5 + 1e-6
    assert (after != before).any()


def test_cutmix_pastes_a_box_of_the_next_image() -> None:
    before, draws = images_and_draws(9)
    draws[4, 1] = 0.5  # the largest box: half of the image
    after = before.copy()
    shares = mix(after, Augmentation(cutmix=1.0), draws)
    for at in range(9):
        drawn = max(draws[at, 1], 1 - draws[at, 1])
        height, width = round(12 * (1 - drawn) ** 0.5), round(15 * (1 - drawn) ** 0.5)
        top, left = int(draws[at, 2] * (13 - height)), int(draws[at, 3] * (16 - width))
        wanted = before[at].copy()
        for y in range(top, top + height):
            for x in range(left, left + width):
                wanted[y, x] = before[(at + 1) % 9][y, x]
        np.testing.assert_array_equal(after[at], wanted)
        assert shares[at] == pytest.approx(1 - height * width / (12 * 15))
    assert shares[4] == pytest.approx(0.5, abs=0.08)


def test_with_both_half_of_the_images_are_cut() -> None:
    draws = keyed_uniforms(0, 0, np.arange(4000), MIX_DRAWS)
    images = np.zeros((4000, 8, 8, 1), dtype=np.uint8)
    images[::2] = 200
    shares = mix(images, Augmentation(mixup=1.0, cutmix=1.0), draws)
    is_blend = ((images != 0) & (images != 200)).reshape(4000, -1).any(axis=1)
    assert is_blend[shares < 0.99].mean() == pytest.approx(0.5, abs=0.03)
    assert shares.mean() == pytest.approx(0.75, abs=0.02)  # of max(s, 1 - s), s uniform


def test_one_image_alone_stays_as_it_is() -> None:
    before, draws = images_and_draws(1)
    for changes in (Augmentation(mixup=1.0), Augmentation(cutmix=1.0)):
        after = before.copy()
        mix(after, changes, draws)
        np.testing.assert_array_equal(after, before)


def test_extreme_draws_are_fine() -> None:
    before, _ = images_and_draws(3)
    for value in (0.0, 1 - 2**-53):
        for changes in (Augmentation(mixup=0.1), Augmentation(cutmix=0.1)):
            shares = mix(before.copy(), changes, np.full((3, MIX_DRAWS), value))
            assert ((shares >= 0.4) & (shares <= 1)).all()
