from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

from megabatch.data.alter import alter
from megabatch.data.augment import ALTER_DRAWS, Augmentation
from megabatch.data.keyed import keyed_uniforms
from tests.data.images import photograph


def altered(image: NDArray[np.uint8], policy: Augmentation, **draws: float) -> NDArray[np.uint8]:
    """With the given draws; one half, which changes nothing, for the others."""
    names = ("brightness", "contrast", "saturation", "angle", "noise")
    batch: NDArray[np.uint8] = image[None].copy()
    alter(batch, policy, np.array([[draws.get(name, 0.5) for name in names]]))
    changed: NDArray[np.uint8] = batch[0]
    return changed


@pytest.mark.parametrize("draw", [0.0, 0.2, 0.9])
@pytest.mark.parametrize(
    ("name", "enhance"),
    [
        ("brightness", ImageEnhance.Brightness),
        ("contrast", ImageEnhance.Contrast),
        ("saturation", ImageEnhance.Color),
    ],
)
def test_against_pillow_s_enhancers(name: str, enhance: Any, draw: float) -> None:
    image = photograph(20, 30)
    changed: dict[str, Any] = {name: 0.6}
    got = altered(image, Augmentation(**changed), **{name: draw})
    expected = np.asarray(enhance(Image.fromarray(image)).enhance(1 + 0.6 * (2 * draw - 1)))
    # Pillow cuts to whole numbers on the way and rounds the mean grey.
    np.testing.assert_allclose(got.astype(int), expected, atol=1.6)
    assert (got != image).any()


def test_grey_images_and_all_at_once() -> None:
    grey = photograph(20, 30)[..., :1]
    policy = Augmentation(brightness=0.5, contrast=0.5, saturation=0.5)
    got = altered(grey, policy, brightness=0.8, contrast=0.1, saturation=0.0)
    bright = grey * 1.3
    expected = np.clip((bright - bright.mean()) * 0.6 + bright.mean(), 0, 255)
    np.testing.assert_allclose(got, expected, atol=0.6)
    np.testing.assert_array_equal(altered(grey, policy), grey)  # factors of one


def test_rotation() -> None:
    image = photograph(21, 21)
    policy = Augmentation(rotation_degrees=90)
    np.testing.assert_array_equal(altered(image, policy), image)
    quarter = altered(image, policy, angle=1.0)
    np.testing.assert_array_equal(quarter, np.rot90(image))
    tilted = altered(image, Augmentation(rotation_degrees=30), angle=1.0)
    assert not tilted[0, 0].any()  # corners become black
    assert tilted[10, 10].any()


def test_noise_has_the_stated_strength_and_no_pattern() -> None:
    image = np.full((200, 300, 3), 128, dtype=np.uint8)
    noise = altered(image, Augmentation(noise_std=8.0), noise=0.123).astype(float) - 128
    count = noise.size
    assert abs(noise.mean()) < 4 * 8 / count**0.5
    # Rounding to whole levels adds a variance of 1/12.
    assert noise.std() == pytest.approx((64 + 1 / 12) ** 0.5, rel=0.01)
    assert abs(np.corrcoef(noise[:, :-1].ravel(), noise[:, 1:].ravel())[0, 1]) < 4 / count**0.5
    assert abs(np.corrcoef(noise[..., 0].ravel(), noise[..., 1].ravel())[0, 1]) < 5 / (count / 3) ** 0.5
    other = altered(image, Augmentation(noise_std=8.0), noise=0.124).astype(float) - 128
    assert abs(np.corrcoef(noise.ravel(), other.ravel())[0, 1]) < 4 / count**0.5
    edge = altered(np.zeros((9, 9, 3), dtype=np.uint8), Augmentation(noise_std=50.0), noise=0.5)
    assert edge.min() == 0  # cut off, not wrapped around
    assert edge.max() < 230


def test_a_image_does_not_depend_on_its_company() -> None:
    policy = Augmentation(brightness=0.4, contrast=0.4, saturation=0.4, rotation_degrees=10, noise_std=3)
    images = np.stack([photograph(16, 16, seed) for seed in range(5)])
    draws = keyed_uniforms(0, 0, np.arange(5), ALTER_DRAWS)
    together = images.copy()
    alter(together, policy, draws)
    for at in range(5):
        alone = images[at : at + 1].copy()
        alter(alone, policy, draws[at : at + 1])
        np.testing.assert_array_equal(alone[0], together[at])
    assert (together != images).any(axis=(1, 2, 3)).all()
