"""Every kind of source passes one suite."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from megabatch.data.decode import decode_image
from megabatch.data.formats import KINDS, open_source
from megabatch.data.sources import (
    EncodedImages,
    HasBytes,
    ImageArray,
    Source,
    Split,
    check_same_classes,
    checked_labels,
    image_name,
    in_memory,
)
from megabatch.errors import ConfigError, DataError
from tests.data.conftest import MAKERS, ImageSet, png_bytes, random_images

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
    names = {image_name(source, index) for index in range(len(source))}
    assert len(names) == len(source)
    if isinstance(source, HasBytes):
        for index in range(len(source)):
            decoded = decode_image(source.read_bytes(index), source.channels, "x")
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


# --- opening ---


def test_path_left_out() -> None:
    with pytest.raises(DataError, match="'parquet' needs a path and none was given"):
        open_source("parquet", None, "train")


def test_generated_takes_no_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'generated' takes no path"):
        open_source("generated", tmp_path, "train")


@pytest.mark.parametrize("kind", ["folder", "generated", "parquet"])
def test_wrong_number_of_channels(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="channels is 4"):
        open_source(kind, None if kind == "generated" else tmp_path, "train", channels=4)


def test_unknown_kind_and_split(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown data source 'fashon-mnist' .*; did you mean 'fashion-mnist'\?"):
        open_source("fashon-mnist", tmp_path, "train")
    with pytest.raises(ConfigError, match="split is 'test'; it must be train or val"):
        open_source("idx", tmp_path, cast(Split, "test"))


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


def test_remote_addresses_are_for_tar_alone() -> None:
    with pytest.raises(ConfigError, match=r"s3://bucket/x is a remote address, which only tar shards can be read from"):
        open_source("parquet", "s3://bucket/x", "train")


def test_in_memory_gives_up_on_a_late_odd_size() -> None:
    images = [np.full((2, 2, 1), i % 256, dtype=np.uint8) for i in range(1000)]

    class Listed:
        name, num_classes, channels = "listed", 1, 1
        labels = np.zeros(1000, dtype=np.int64)

        def __len__(self) -> int:
            return 1000

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
    assert isinstance(Two(), HasBytes)
    assert not isinstance(ImageArray("a", np.zeros((1, 2, 2, 3), dtype=np.uint8), [0]), HasBytes)
