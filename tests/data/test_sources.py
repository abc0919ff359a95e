"""Every kind of source passes one suite."""

from __future__ import annotations

import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megabatch.data.decode import decode_image
from megabatch.data.formats import KINDS, open_source
from megabatch.data.sources import (
    EncodedImages,
    ImageArray,
    Source,
    Split,
    Subset,
    check_same_classes,
    checked_labels,
    downscale,
    in_memory,
    limit_and_hold_out,
    mixed_order,
)
from megabatch.errors import ConfigError, DataError
from tests.data.conftest import MAKERS, MANY_SIZES, ImageSet, make_folder, png_bytes, random_images

SPLITS: tuple[Split, ...] = ("train", "val")


def opened(given: ImageSet, split: Split, **more: Any) -> Source:
    return open_source(given.kind, given.path, split, **{**given.options, **more})


def all_images(source: Source) -> list[NDArray[np.uint8]]:
    return [source.read(index) for index in range(len(source))]


# --- the contract ---


def test_every_kind_is_in_the_suite(tmp_path: Path) -> None:
    kinds = set()
    for name, make in MAKERS.items():
        (tmp_path / name).mkdir()
        kinds.add(make(tmp_path / name).kind)
    assert kinds == set(KINDS)


@pytest.mark.parametrize("split", SPLITS)
def test_labels_classes_channels_and_name(image_set: ImageSet, split: Split) -> None:
    source = opened(image_set, split)
    assert source.labels.dtype == np.int64
    assert source.labels.tolist() == image_set.labels[split]
    assert len(source) == len(image_set.labels[split])
    assert source.num_classes == image_set.num_classes
    assert source.channels == image_set.channels
    assert source.name


@pytest.mark.parametrize("split", SPLITS)
def test_images_are_uint8_and_the_right_ones(image_set: ImageSet, split: Split) -> None:
    source = opened(image_set, split)
    for index in range(len(source)):
        image = source.read(index)
        assert image.dtype == np.uint8
        assert image.ndim == 3
        assert image.shape[2] == source.channels
        if image_set.images is not None:
            np.testing.assert_array_equal(image, image_set.images[split][index])


def test_reading_depends_on_the_index_alone(image_set: ImageSet) -> None:
    first, second = opened(image_set, "train"), opened(image_set, "train")
    forward = all_images(first)
    for index in reversed(range(len(second))):
        np.testing.assert_array_equal(second.read(index), forward[index])
        np.testing.assert_array_equal(first.read(index), forward[index])


def test_reading_from_threads(image_set: ImageSet) -> None:
    source = opened(image_set, "train")
    expected = all_images(opened(image_set, "train"))
    indices = [index for _ in range(8) for index in range(len(source))]
    with ThreadPoolExecutor(4) as pool:
        for index, image in zip(indices, pool.map(source.read, indices), strict=True):
            np.testing.assert_array_equal(image, expected[index])


def test_a_reader_cannot_change_the_source(image_set: ImageSet) -> None:
    source = opened(image_set, "train")
    image = source.read(1)
    before = image.copy()
    if image.flags.writeable:
        image[:] = 255 - image
    np.testing.assert_array_equal(source.read(1), before)


def test_splits_hold_different_images_and_agree_about_classes(image_set: ImageSet) -> None:
    train, val = opened(image_set, "train"), opened(image_set, "val")
    check_same_classes(train, val)
    known = {image.tobytes() for image in all_images(train)}
    assert not any(image.tobytes() in known for image in all_images(val))


def test_encoded_images_are_handed_out_and_named(image_set: ImageSet) -> None:
    source = opened(image_set, "train")
    names = {source.name_of(index) for index in range(len(source))}
    assert len(names) == len(source)
    for index in range(len(source)):
        if (stored := source.read_bytes(index)) is not None:
            decoded = decode_image(stored, source.channels, "x")
            np.testing.assert_array_equal(decoded, source.read(index))


def test_a_source_can_be_sent_to_another_process(image_set: ImageSet) -> None:
    source = opened(image_set, "train")
    source.read(0)
    arrived = pickle.loads(pickle.dumps(source))
    assert arrived.labels.tolist() == source.labels.tolist()
    for index in range(len(source)):
        np.testing.assert_array_equal(arrived.read(index), source.read(index))


# Generated labels follow from the number of classes, so they cannot exceed it.
@pytest.mark.parametrize("image_set", sorted(n for n in MAKERS if "generated" not in n), indirect=True)
def test_too_few_classes_name_the_first_offending_label(image_set: ImageSet) -> None:
    too_few = image_set.num_classes - 1
    labels = image_set.labels["train"]
    index = next(i for i, label in enumerate(labels) if label >= too_few)
    with pytest.raises(DataError, match=f"index {index} .* is {labels[index]}; labels must be 0 .. {too_few - 1}"):
        opened(image_set, "train", num_classes=too_few)


def test_more_classes_than_seen_are_allowed(image_set: ImageSet) -> None:
    assert opened(image_set, "val", num_classes=17).num_classes == 17


def test_unknown_option_is_refused_with_the_nearest(image_set: ImageSet) -> None:
    with pytest.raises(ConfigError, match=r"no option 'num_clases' .*; did you mean 'num_classes'"):
        opened(image_set, "train", num_clases=3)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"generated"}))
def test_missing_path(kind: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        open_source(kind, tmp_path / "nowhere", "train")


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"generated"}))
def test_empty_folder(kind: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no|has neither"):
        open_source(kind, tmp_path, "train")


# --- labels ---


@pytest.mark.parametrize(
    ("labels", "num_images", "num_classes", "message"),
    [
        ([0, 1], 3, None, "3 images and 2 labels: the image at index 2 has no label"),
        ([0, 1, 7, 1], 2, None, "2 images and 4 labels: label 7 at index 2 has no image"),
        ([0, -1, 1], 3, None, "label at index 1 of x is -1; labels must be 0 .. 1"),
        ([0, 1, 5, 6], 4, 5, "label at index 2 of x is 5; labels must be 0 .. 4, or num_classes larger than 5"),
        ([0.0, 1.0], 2, None, "label at index 0 of x is .*0.0.*; labels must be integers"),
        (["cat", "dog"], 2, None, "label at index 0 of x is .*'cat'.*; labels must be integers"),
        ([[0], [1]], 2, None, "labels of x have shape"),
        ([], 0, None, "x has no images"),
        ([0], 1, 0, "num_classes is 0"),
    ],
)
def test_wrong_labels(labels: list[Any], num_images: int, num_classes: int | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        checked_labels("x", labels, num_images, num_classes)


def test_labels_become_int64_and_count_the_classes() -> None:
    labels, num_classes = checked_labels("x", np.array([0, 4, 2], dtype=np.uint8), 3, None)
    assert labels.dtype == np.int64
    assert labels.tolist() == [0, 4, 2]
    assert num_classes == 5


def test_splits_that_disagree() -> None:
    grey, colour = np.zeros((2, 3, 3, 1), dtype=np.uint8), np.zeros((2, 3, 3, 3), dtype=np.uint8)
    with pytest.raises(DataError, match="num_classes is 2 in a but 3 in b"):
        check_same_classes(ImageArray("a", grey, [0, 1]), ImageArray("b", grey, [0, 2]))
    with pytest.raises(DataError, match="channels is 1 in a but 3 in b"):
        check_same_classes(ImageArray("a", grey, [0, 1]), ImageArray("b", colour, [0, 1]))


# --- memory ---


def test_image_array_is_read_only_but_leaves_the_given_array_alone() -> None:
    given = np.zeros((2, 3, 3, 1), dtype=np.uint8)
    source = ImageArray("a", given, [0, 1])
    with pytest.raises(ValueError, match="read-only"):
        source.read(0)[0, 0, 0] = 1
    assert given.flags.writeable


def test_in_memory_respects_the_limit_to_the_byte(tmp_path: Path) -> None:
    lazy = opened(MAKERS["folder-on-demand"](tmp_path), "train")
    needed = len(lazy) * lazy.read(0).size
    assert isinstance(in_memory(lazy, needed), ImageArray)
    assert in_memory(lazy, needed - 1) is lazy


@pytest.mark.parametrize("name", ["ant/000.png", "bee/006.png"])
def test_in_memory_leaves_broken_images_to_whoever_reads_them(tmp_path: Path, name: str) -> None:
    MAKERS["folder-in-memory"](tmp_path)
    (tmp_path / "train" / name).write_bytes(b"broken")
    source = open_source("folder", tmp_path, "train")
    assert not isinstance(source, ImageArray)
    assert len(source) == 11


def test_in_memory_gives_up_on_a_late_odd_size() -> None:
    images = [np.full((2, 2, 1), i % 256, dtype=np.uint8) for i in range(1000)]

    class Listed(Source):
        name, num_classes, channels = "listed", 1, 1
        labels = np.zeros(1000, dtype=np.int64)

        def read(self, index: int) -> NDArray[np.uint8]:
            return images[index]

    listed = Listed()
    decoded = in_memory(listed)
    assert isinstance(decoded, ImageArray)
    np.testing.assert_array_equal(decoded.images, np.stack(images))
    images[999] = np.zeros((3, 2, 1), dtype=np.uint8)
    assert in_memory(listed) is listed


class Two(EncodedImages):
    channels = 3
    images = random_images(0, [(3, 4)], 3)

    def read_bytes(self, index: int) -> bytes:
        return png_bytes(self.images[0]) if index == 0 else b"nothing"

    def name_of(self, index: int) -> str:
        return f"number {index}"


def test_reading_decodes_and_names_what_cannot_be_decoded() -> None:
    np.testing.assert_array_equal(Two().read(0), Two.images[0])
    with pytest.raises(DataError, match="cannot decode the image number 1: "):
        Two().read(1)


def test_sources_that_have_bytes_are_told_from_those_that_have_none() -> None:
    assert Two().read_bytes(0) is not None
    assert ImageArray("a", np.zeros((1, 2, 2, 3), dtype=np.uint8), [0]).read_bytes(0) is None


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


class OnDemand(Source):
    """A source that decodes when asked, and counts it."""

    def __init__(self, source: ImageArray) -> None:
        self.name, self.num_classes, self.channels, self.labels = "on demand", 4, 1, source.labels
        self._source = source
        self.reads = 0

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
    part = Subset("part", whole, np.array([7, 2]))
    assert part.read_bytes(0) is not None
    assert part.read_bytes(0) == whole.read_bytes(7)
    assert part.name_of(1) == whole.name_of(2)
    np.testing.assert_array_equal(part.read(1), whole.read(2))
    some, held_out = limit_and_hold_out(whole, 4, 3)
    assert isinstance(some, Subset)
    assert isinstance(held_out, Subset)
