from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megabatch.data.generated import GeneratedImages, class_parts, open_generated, stripes
from megabatch.data.sources import ImageArray, Split
from megabatch.errors import ConfigError


def made(split: Split = "train", **changed: Any) -> GeneratedImages:
    options = {"num_images": 300, "image_size": 16, "channels": 3, "num_classes": 10, "seed": 0}
    return GeneratedImages(split, **{**options, **changed})


def in_one_array(split: Split, **options: Any) -> ImageArray:
    source = open_generated(None, split, **options)
    assert isinstance(source, ImageArray)
    return source


@pytest.mark.parametrize(
    ("options", "digest"),
    [
        ({}, "ebcb6b985fd50441"),
        ({"channels": 1, "image_size": 28, "seed": 7, "num_classes": 1000}, "ba46f0afcde6eacf"),
    ],
)
def test_images_never_change(options: dict[str, Any], digest: str) -> None:
    # Only exactly rounded arithmetic is used, so these hold on every platform and with every numpy.
    images = made(**options).render(np.arange(20))
    assert hashlib.sha256(images.tobytes()).hexdigest()[:16] == digest


@settings(max_examples=40)
@given(
    indices=st.lists(st.integers(0, 299), min_size=1, max_size=20),
    size=st.sampled_from([8, 11, 28]),
    channels=st.sampled_from([1, 3]),
    num_classes=st.sampled_from([2, 10, 1000]),
)
def test_a_image_does_not_depend_on_its_company(indices: list[int], size: int, channels: int, num_classes: int) -> None:
    source = made(image_size=size, channels=channels, num_classes=num_classes)
    together = source.render(np.array(indices))
    for at, index in enumerate(indices):
        np.testing.assert_array_equal(together[at], source.read(index))


def test_seed_split_and_index_matter_and_the_size_of_the_set_does_not() -> None:
    first = made().read(3)
    np.testing.assert_array_equal(first, made(num_images=5).read(3))
    for other in (made(seed=1).read(3), made("val").read(3), made().read(13)):
        assert not np.array_equal(first, other)


@pytest.mark.parametrize("other", [("val", 0), ("train", 1)], ids=["split", "seed"])
def test_splits_and_seeds_share_neither_shapes_nor_noise(other: tuple[Split, int]) -> None:
    def centred(split: Split, seed: int) -> NDArray[np.float64]:
        pixels = made(split, seed=seed).render(np.arange(300)).reshape(300, -1).astype(np.float64)
        pixels -= pixels.mean(axis=0)
        return pixels

    first, second = centred("train", 0), centred(*other)
    # Shared shapes show as 0.4 and shared noise as 0.6; images of one class ten apart set the measure.
    same_index = np.corrcoef(first.ravel(), second.ravel())[0, 1]
    ten_apart = np.corrcoef(first[:-10].ravel(), second[10:].ravel())[0, 1]
    assert abs(same_index - ten_apart) < 0.05


@pytest.mark.parametrize("size", [8, 9, 64, 256])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("num_classes", [2, 10, 1000])
def test_sizes_channels_and_classes(size: int, channels: int, num_classes: int) -> None:
    source = made(image_size=size, channels=channels, num_classes=num_classes)
    images = source.render(np.arange(20))
    assert images.shape == (20, size, size, channels)
    assert images.flags.c_contiguous
    assert source.num_classes == num_classes
    # Neither empty nor saturated.
    assert 60 < images.mean() < 140
    assert images.std() > 20
    assert np.isin(images, (0, 255)).mean() < 0.05


@pytest.mark.parametrize("num_classes", [2, 10, 11, 99, 1000, 12345])
def test_every_class_has_its_own_parts(num_classes: int) -> None:
    shape, inner, outer, num_slopes = class_parts(np.arange(num_classes), num_classes)
    assert len(set(zip(shape.tolist(), inner.tolist(), outer.tolist(), strict=True))) == num_classes
    for slope in (inner, outer):
        assert slope.min() >= 0
        assert slope.max() < num_slopes


@pytest.mark.parametrize("slope", [0.0, 0.25, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("up", [0.0, 0.9])
def test_slope_of_the_stripes(slope: float, up: float) -> None:
    size = 64
    centres = ((2 * np.arange(size) + 1) / size - 1).astype(np.float32)
    uniforms = np.array([[0.3], [0.5], [up]])
    wave = stripes(centres[None, :], centres[:, None], np.array([slope]), 5.0, uniforms)[0].astype(np.float64)
    assert np.abs(wave).max() <= 1
    # The strongest frequency of the image points where the slope says, at the asked number of cycles.
    spectrum = np.abs(np.fft.fft2(wave * np.outer(np.hanning(size), np.hanning(size)), (512, 512)))
    row, column = np.unravel_index(np.argmax(spectrum[:, :257]), (512, 257))
    cycles_down = (row - 512 if row > 256 else row) * size / 512
    cycles_across = column * size / 512
    angle = np.degrees(np.arctan2(cycles_down, cycles_across))
    assert abs(abs(angle) - 90 * slope) < 2
    assert abs(np.hypot(cycles_down, cycles_across) - 10) < 0.4
    if 0 < slope < 1:
        assert (angle > 0) == (up < 0.5)


def test_labels_are_balanced_and_mirrored_images_keep_their_class() -> None:
    train = in_one_array("train", num_images=4000, image_size=12, channels=1)
    assert np.bincount(train.labels).tolist() == [400] * 10
    images = train.images.astype(np.float64)
    for label in range(10):
        mean = images[train.labels == label].mean(axis=0)
        # 400 images with a standard deviation of about 45 levels: 2.2 levels each way, 5 sigma of a difference.
        assert np.abs(mean - mean[:, ::-1]).max() < 16


def class_means_accuracy(train: ImageArray, val: ImageArray) -> float:
    """The share of val images whose nearest class mean of train is that of their own class."""

    def flat(source: ImageArray) -> NDArray[np.float64]:
        pixels = source.images.reshape(len(source), -1).astype(np.float64)
        pixels -= pixels.mean(axis=1, keepdims=True)
        return pixels

    pixels = flat(train)
    means = np.stack([pixels[train.labels == label].mean(axis=0) for label in range(train.num_classes)])
    scores = flat(val) @ means.T - (means**2).sum(axis=1) / 2
    return float((scores.argmax(axis=1) == val.labels).mean())


def test_ten_classes_can_be_learnt_and_are_not_trivial() -> None:
    options = {"image_size": 28, "channels": 1}
    train = in_one_array("train", num_images=3000, **options)
    val = in_one_array("val", num_images=1000, **options)
    accuracy = class_means_accuracy(train, val)
    assert 0.3 < accuracy < 0.9  # chance is 0.1, with a standard deviation of 0.01


@pytest.mark.parametrize(
    "wrong",
    [{"num_images": 0}, {"image_size": 7}, {"num_classes": 1}, {"channels": 2}, {"seed": -1}],
)
def test_wrong_options(wrong: dict[str, int]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"{name} of the generated images is"):
        open_generated(None, "train", **wrong)
