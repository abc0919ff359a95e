"""Crops, flips, colour, angle and noise."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

from megabatch.data.augment import (
    CROP_TRIES,
    DISTORT_DRAWS,
    Augmentation,
    distort,
    erase,
    pad_crop_flip,
    resized_crop_box,
)
from megabatch.data.randomness import keyed_uniforms
from tests.data.images import photograph

# --- settings ---


def test_settings_are_frozen_and_count_their_draws() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Augmentation().flip = True  # type: ignore[misc]
    assert [Augmentation(crop=crop).num_draws for crop in ("none", "pad", "resized")] == [1, 3, 41]


# --- pad, crop, flip ---


@settings(max_examples=60)
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 7), st.integers(1, 7), st.sampled_from([1, 3])),
    padding=st.integers(0, 5),
    flip=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_pad_crop_flip_against_one_image_at_a_time(
    shape: tuple[int, int, int, int], padding: int, flip: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    images = rng.integers(1, 256, shape, dtype=np.uint8)
    before = images.copy()
    uniforms = rng.random((shape[0], 3))
    uniforms[0] = [0.5, 0.0, 1 - 2**-53]  # the extreme offsets, and the first draw that does not flip
    out = pad_crop_flip(images, padding, flip, uniforms)
    assert out.flags.c_contiguous
    assert out.flags.writeable
    assert not np.shares_memory(out, images)
    np.testing.assert_array_equal(images, before)
    for image, u, got in zip(images, uniforms, out, strict=True):
        padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)))
        top, left = int(np.floor(u[1] * (2 * padding + 1))), int(np.floor(u[2] * (2 * padding + 1)))
        window = padded[top : top + shape[1], left : left + shape[2]]
        np.testing.assert_array_equal(got, window[:, ::-1] if flip and u[0] < 0.5 else window)


def test_offsets_are_even_and_reach_both_ends() -> None:
    # One bright pixel in the middle shows where the window was cut.
    image = np.zeros((9, 9, 1), dtype=np.uint8)
    image[4, 4] = 1
    uniforms = keyed_uniforms(0, 0, np.arange(8100), 3)
    moved = pad_crop_flip(np.repeat(image[None], 8100, axis=0), 4, False, uniforms)
    places = np.flatnonzero(moved.reshape(8100, 81).sum(axis=0))
    assert len(places) == 81
    counts = moved.reshape(8100, 81).sum(axis=0, dtype=np.int64)
    assert ((counts - 100) ** 2).sum() / 100 < 80 + 4 * (2 * 80) ** 0.5


# --- resized crop ---


def draws(*tries: tuple[float, float, float, float]) -> NDArray[np.float64]:
    values = [number for one_try in tries for number in one_try]
    return np.array(values + [0.0] * (CROP_TRIES * 4 - len(values)))


SQUARE = Augmentation(crop="resized", area_min=0.25, area_max=1.0, aspect_min=0.25, aspect_max=4.0)


@pytest.mark.parametrize(
    ("size", "uniforms", "box"),
    [
        # A quarter of 100 x 100 at aspect 1 is 50 x 50; offsets 0 .. 50 are 51 places.
        ((100, 100), draws((0.0, 0.5, 0.0, 0.0)), (0, 0, 50, 50)),
        ((100, 100), draws((0.0, 0.5, 0.999, 0.5)), (25, 50, 75, 100)),
        # Aspect 1/4: 25 wide and 100 high.
        ((100, 100), draws((0.0, 0.0, 0.5, 0.5)), (38, 0, 63, 100)),
        # The first try is 200 wide and does not fit; the second is taken.
        ((100, 100), draws((1.0, 1.0, 0.0, 0.0), (0.0, 0.5, 0.5, 0.5)), (25, 25, 75, 75)),
        # Height comes first: 80 high, 20 wide.
        ((80, 20), draws((1.0, 0.0, 0.0, 0.0)), (0, 0, 20, 80)),
    ],
)
def test_boxes_worked_out_by_hand(
    size: tuple[int, int], uniforms: NDArray[np.float64], box: tuple[int, int, int, int]
) -> None:
    assert resized_crop_box(*size, SQUARE, uniforms) == box


WHOLE = Augmentation(crop="resized", area_min=1.0, area_max=1.0, aspect_min=0.5, aspect_max=2.0)


@pytest.mark.parametrize(
    ("size", "box"),
    [
        ((10, 50), (15, 0, 35, 10)),  # too wide: the height counts, 20 x 10 in the middle
        ((50, 10), (0, 15, 10, 35)),
        ((10, 15), (0, 0, 15, 10)),  # within the aspect limits: all of it
    ],
)
def test_centre_box_when_no_try_fits(size: tuple[int, int], box: tuple[int, int, int, int]) -> None:
    never_fits = draws(*[(0.5, 0.5, 0.5, 0.5)] * CROP_TRIES)
    assert resized_crop_box(*size, WHOLE, never_fits) == box


@settings(max_examples=200)
@given(height=st.integers(1, 600), width=st.integers(1, 600), sample=st.integers(0, 10**6))
def test_boxes_lie_inside_and_keep_the_limits(height: int, width: int, sample: int) -> None:
    policy = Augmentation(crop="resized")
    uniforms = keyed_uniforms(5, 0, np.array([sample]), 40)[0]
    left, top, right, bottom = resized_crop_box(height, width, policy, uniforms)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    box_height, box_width = bottom - top, right - left
    if height >= 32 and width >= 32 and 0.75 <= width / height <= 4 / 3:
        # Rounding moves each side by half a pixel.
        assert (box_height + 0.5) * (box_width + 0.5) >= 0.08 * height * width
        assert (box_width - 0.5) / (box_height + 0.5) <= 4 / 3
        assert (box_width + 0.5) / (box_height - 0.5) >= 3 / 4


def test_areas_and_aspects_are_spread_as_stated() -> None:
    policy = Augmentation(crop="resized", area_min=0.1, area_max=0.5)  # always fits into a square
    uniforms = keyed_uniforms(1, 0, np.arange(4000), 40)
    boxes = np.array([resized_crop_box(1000, 1000, policy, row) for row in uniforms])
    widths, heights = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    areas, aspects = widths * heights / 1e6, np.log(widths / heights) / np.log(4 / 3)
    for values, low, high in ((areas, 0.1, 0.5), (aspects, -1, 1)):
        scaled = (values - low) / (high - low)
        counts = np.bincount(np.clip((scaled * 20).astype(np.int64), 0, 19), minlength=20)
        assert ((counts - 200) ** 2).sum() / 200 < 19 + 5 * (2 * 19) ** 0.5
    assert abs(np.corrcoef(areas, aspects)[0, 1]) < 4 / 4000**0.5


@pytest.mark.parametrize("size", [(375, 500), (500, 375), (64, 64), (9, 4000)])
def test_a_square_of_a_share_of_the_shorter_side_moves_and_never_changes_its_size(size: tuple[int, int]) -> None:
    policy = Augmentation(crop="resized", side_share=7 / 8)
    uniforms = keyed_uniforms(3, 0, np.arange(400), policy.num_draws)[:, 1:]
    boxes = np.array([resized_crop_box(*size, policy, row) for row in uniforms])
    side = round(7 / 8 * min(size))
    assert (boxes[:, 2] - boxes[:, 0] == side).all()
    assert (boxes[:, 3] - boxes[:, 1] == side).all()
    # Every place is used: from the first pixel to the last.
    assert (boxes[:, :2].min(axis=0) >= 0).all()
    assert boxes[:, 3].max() == size[0]
    assert boxes[:, 2].max() >= size[1] - size[1] // 50
    assert boxes[:, 1].min() == 0


def distorted(image: NDArray[np.uint8], policy: Augmentation, **draws: float) -> NDArray[np.uint8]:
    """With the given draws; one half, which changes nothing, for the others."""
    names = ("brightness", "contrast", "saturation", "angle", "noise")
    batch: NDArray[np.uint8] = image[None].copy()
    distort(batch, policy, np.array([[draws.get(name, 0.5) for name in names]]))
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
    got = distorted(image, Augmentation(**changed), **{name: draw})
    expected = np.asarray(enhance(Image.fromarray(image)).enhance(1 + 0.6 * (2 * draw - 1)))
    # Pillow cuts to whole numbers on the way and rounds the mean grey.
    np.testing.assert_allclose(got.astype(int), expected, atol=1.6)
    assert (got != image).any()


def test_grey_images_and_all_at_once() -> None:
    grey = photograph(20, 30)[..., :1]
    policy = Augmentation(brightness=0.5, contrast=0.5, saturation=0.5)
    got = distorted(grey, policy, brightness=0.8, contrast=0.1, saturation=0.0)
    bright = grey * 1.3
    expected = np.clip((bright - bright.mean()) * 0.6 + bright.mean(), 0, 255)
    np.testing.assert_allclose(got, expected, atol=0.6)
    np.testing.assert_array_equal(distorted(grey, policy), grey)  # factors of one


def test_rotation() -> None:
    image = photograph(21, 21)
    policy = Augmentation(rotation_degrees=90)
    np.testing.assert_array_equal(distorted(image, policy), image)
    quarter = distorted(image, policy, angle=1.0)
    np.testing.assert_array_equal(quarter, np.rot90(image))
    tilted = distorted(image, Augmentation(rotation_degrees=30), angle=1.0)
    assert not tilted[0, 0].any()  # corners become black
    assert tilted[10, 10].any()


def test_noise_has_the_stated_strength_and_no_pattern() -> None:
    image = np.full((200, 300, 3), 128, dtype=np.uint8)
    noise = distorted(image, Augmentation(noise_std=8.0), noise=0.123).astype(float) - 128
    count = noise.size
    assert abs(noise.mean()) < 4 * 8 / count**0.5
    # Rounding to whole levels adds a variance of 1/12.
    assert noise.std() == pytest.approx((64 + 1 / 12) ** 0.5, rel=0.01)
    assert abs(np.corrcoef(noise[:, :-1].ravel(), noise[:, 1:].ravel())[0, 1]) < 4 / count**0.5
    assert abs(np.corrcoef(noise[..., 0].ravel(), noise[..., 1].ravel())[0, 1]) < 5 / (count / 3) ** 0.5
    other = distorted(image, Augmentation(noise_std=8.0), noise=0.124).astype(float) - 128
    assert abs(np.corrcoef(noise.ravel(), other.ravel())[0, 1]) < 4 / count**0.5
    edge = distorted(np.zeros((9, 9, 3), dtype=np.uint8), Augmentation(noise_std=50.0), noise=0.5)
    assert edge.min() == 0  # cut off, not wrapped around
    assert edge.max() < 230


def test_an_image_does_not_depend_on_its_company() -> None:
    policy = Augmentation(brightness=0.4, contrast=0.4, saturation=0.4, rotation_degrees=10, noise_std=3)
    images = np.stack([photograph(16, 16, seed) for seed in range(5)])
    draws = keyed_uniforms(0, 0, np.arange(5), DISTORT_DRAWS)
    together = images.copy()
    distort(together, policy, draws)
    for at in range(5):
        alone = images[at : at + 1].copy()
        distort(alone, policy, draws[at : at + 1])
        np.testing.assert_array_equal(alone[0], together[at])
    assert (together != images).any(axis=(1, 2, 3)).all()


def test_a_box_is_erased_worked_out_by_hand() -> None:
    """0.02 + 0.31 / 2 of 40 x 40 is 280 pixels; aspect 0.3 * (1 / 0.09) ** 0.5 = 1: a square of 17."""
    image = np.random.default_rng(0).integers(0, 256, (1, 40, 40, 3), dtype=np.uint8)
    found, kept = image.copy(), image.copy()
    erase(found, 0.5, np.array([[0.4, 0.5, 0.5, 0.0, 0.999]]))
    expected = image.copy()
    expected[0, :17, 23:] = image[0].reshape(-1, 3).astype(np.int64).sum(axis=0) // 1600
    assert (found == expected).all()
    erase(kept, 0.5, np.array([[0.5, 0.5, 0.5, 0.0, 0.999]]))
    assert (kept == image).all()


def test_erasing_has_draws_of_its_own_and_the_stated_spread() -> None:
    policy = Augmentation(crop="pad", padding=2, noise_std=1.0, erase=0.25)
    assert policy.num_draws == Augmentation(crop="pad", padding=2, noise_std=1.0).num_draws + 5
    images = np.zeros((2000, 32, 32, 1), dtype=np.uint8)
    images[:, ::2] = 200  # stripes of mean 100
    before = images.copy()
    erase(images, 0.25, keyed_uniforms(1, 0, np.arange(2000), 5))
    shares = (images == 100).mean(axis=(1, 2, 3))
    assert (images != before).any(axis=(1, 2, 3)).mean() == pytest.approx(0.25, abs=0.03)
    assert shares.max() <= 0.36  # rounded to whole pixels
    assert shares[shares > 0].min() >= 0.015
    assert shares[shares > 0].mean() == pytest.approx(0.175, abs=0.02)
