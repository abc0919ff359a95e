"""Mean and std of pixels, against all pixels at once; measured once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megabatch.data.sources import ImageArray
from megabatch.data.statistics import cached_pixels, measure_pixels
from megabatch.errors import DataError


def images(seed: int = 0) -> ImageArray:
    pixels = np.random.default_rng(seed).integers(0, 200, (20, 8, 8, 3), dtype=np.uint8)
    pixels[..., 1] //= 4
    return ImageArray("test", pixels, np.arange(20) % 4)


def test_against_numpy() -> None:
    found = measure_pixels(images(), 8)
    every = images().images.reshape(-1, 3) / 255
    assert found.mean == tuple(every.mean(axis=0).round(3))
    assert found.std == tuple(every.std(axis=0).round(3))
    assert found.num_images == 20


def test_measured_once_for_a_set(tmp_path: Path) -> None:
    first = cached_pixels(images(), 8, tmp_path)
    again = cached_pixels(images(), 8, tmp_path)
    assert (first.is_cached, again.is_cached) == (False, True)
    assert (again.mean, again.std) == (first.mean, first.std)
    assert not cached_pixels(images(1), 8, tmp_path).is_cached  # other pixels, same labels
    assert not cached_pixels(images(), 16, tmp_path).is_cached


def test_images_of_one_colour() -> None:
    plain = ImageArray("test", np.full((4, 8, 8, 3), 7, dtype=np.uint8), [0, 1, 0, 1])
    with pytest.raises(DataError, match="have one colour only"):
        measure_pixels(plain, 8)
