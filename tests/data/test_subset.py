"""Fixed parts of a set: same mix of classes, never the same image twice, independent of seeds; and area averaging."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabatch.data.formats import open_source
from megabatch.data.sources import HasBytes, ImageArray
from megabatch.data.subset import EncodedSubset, Subset, downscale, limit_and_hold_out, mixed_order
from megabatch.errors import DataError
from tests.data.conftest import MANY_SIZES, make_folder

GOLDEN = [5, 0, 1, 2, 4, 11, 8, 3, 6, 7, 10, 9]


def numbered(labels: list[int], size: int = 8) -> ImageArray:
    """Images whose first pixel is their own number."""
    images = np.zeros((len(labels), size, size, 1), dtype=np.uint8)
    images[:, 0, 0, 0] = np.arange(len(labels))
    return ImageArray("numbered", images, labels, num_classes=4)


def numbers(source: Any) -> list[int]:
    return [int(source.read(index)[0, 0, 0]) for index in range(len(source))]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=200), st.data())
def test_every_beginning_and_end_has_each_class_in_its_share(labels: list[int], data: st.DataObject) -> None:
    order = mixed_order(np.array(labels))
    assert sorted(order.tolist()) == list(range(len(labels)))
    count = data.draw(st.integers(1, len(labels)))
    for part in (order[:count], order[-count:]):
        found = Counter(labels[index] for index in part.tolist())
        for label, size in Counter(labels).items():
            assert abs(found[label] - count * size / len(labels)) < 1.0 + 1e-9


def test_the_order_is_mixed_and_never_changes() -> None:
    labels = np.array([0, 1] * 6)
    assert mixed_order(labels).tolist() == GOLDEN
    assert mixed_order(labels).tolist() != sorted(GOLDEN)


def test_limited_and_held_out_images_never_meet() -> None:
    source = numbered([0, 1, 2, 3] * 30)
    train, held_out = limit_and_hold_out(source, 40, 20)
    assert held_out is not None
    assert (len(train), len(held_out)) == (40, 20)
    assert not set(numbers(train)) & set(numbers(held_out))
    assert Counter(train.labels.tolist()) == dict.fromkeys(range(4), 10)
    for part in (train, held_out):
        assert [source.labels[number] for number in numbers(part)] == part.labels.tolist()


def test_all_that_is_not_held_out_and_nothing_asked() -> None:
    source = numbered([0, 1, 2, 3] * 30)
    train, held_out = limit_and_hold_out(source, 0, 20)
    assert held_out is not None
    assert sorted(numbers(train) + numbers(held_out)) == list(range(120))
    assert limit_and_hold_out(source, 0, 0) == (source, None)


class OnDemand:
    """A source that decodes when asked, and counts it."""

    def __init__(self, source: ImageArray) -> None:
        self.name, self.num_classes, self.channels, self.labels = "on demand", 4, 1, source.labels
        self._source = source
        self.reads = 0

    def __len__(self) -> int:
        return len(self._source)

    def read(self, index: int) -> Any:
        self.reads += 1
        return self._source.read(index)


def test_only_the_chosen_images_are_decoded() -> None:
    source = OnDemand(numbered([0, 1, 2, 3] * 30))
    train, _ = limit_and_hold_out(source, 12, 0)
    assert isinstance(train, ImageArray)
    assert source.reads <= 13  # one more to see the size
    assert [source.labels[number] for number in numbers(train)] == train.labels.tolist()


def test_a_subset_reads_through() -> None:
    source = numbered([3, 2, 1, 0])
    part = Subset("part", source, np.array([2, 0]))
    assert (numbers(part), part.labels.tolist(), len(part)) == ([2, 0], [1, 3], 2)


@pytest.mark.parametrize(("limit", "held_out"), [(121, 0), (100, 21), (0, 120)])
def test_more_than_there_is(limit: int, held_out: int) -> None:
    with pytest.raises(DataError, match="need more images than the 120 of numbered; ask for fewer"):
        limit_and_hold_out(numbered([0, 1, 2, 3] * 30), limit, held_out)


@pytest.mark.parametrize("channels", [1, 3])
def test_downscaling_averages_areas(channels: int) -> None:
    images = np.random.default_rng(1).integers(0, 256, (5, 28, 28, channels), dtype=np.uint8)
    small = downscale(ImageArray("x", images, [0, 1, 2, 3, 0]), 14)
    assert isinstance(small, ImageArray)
    exact = images.reshape(5, 14, 2, 14, 2, channels).astype(np.float64).mean(axis=(2, 4))
    assert small.images.shape == (5, 14, 14, channels)
    # Pillow rounds after the rows and again after the columns.
    assert np.abs(small.images - exact).max() <= 1.0
    assert small.labels.tolist() == [0, 1, 2, 3, 0]


def test_small_images_stay_and_odd_ones_are_refused() -> None:
    source = numbered([0, 1, 2], size=12)
    assert downscale(source, 12) is source
    wide = ImageArray("wide", np.zeros((2, 8, 10, 1), dtype=np.uint8), [0, 1])
    with pytest.raises(DataError, match="needs square images of one size"):
        downscale(wide, 8)


def test_a_part_of_encoded_images_hands_out_their_bytes(tmp_path: Path) -> None:
    whole = open_source("folder", make_folder(tmp_path, MANY_SIZES, 0).path, "train", memory_limit_bytes=0)
    part = EncodedSubset("part", whole, np.array([7, 2]))
    assert isinstance(whole, HasBytes)
    assert part.read_bytes(0) == whole.read_bytes(7)
    assert part.name_of(1) == whole.name_of(2)
    np.testing.assert_array_equal(part.read(1), whole.read(2))
    some, held_out = limit_and_hold_out(whole, 4, 3)
    assert isinstance(some, EncodedSubset)
    assert isinstance(held_out, EncodedSubset)
