"""Arrays of training and evaluation images, and the list of images that cannot be read."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from megabatch.data.augment import Augmentation, pad_crop_flip, resized_crop_box
from megabatch.data.batches import (
    GREY,
    JUDGED_OVER_IMAGES,
    Broken,
    BrokenLog,
    LoaderSettings,
    assemble_evaluation,
    assemble_training,
    evaluation_batches,
    fit,
)
from megabatch.data.decode import EXACT, resize
from megabatch.data.formats import open_source
from megabatch.data.randomness import keyed_uniforms
from megabatch.data.sources import ImageArray, Source
from megabatch.errors import DataError
from tests.data.conftest import MANY_SIZES, ImageSet, make_folder, make_parquet, random_images

POLICIES = {
    "none": Augmentation(),
    "flip": Augmentation(flip=True),
    "pad": Augmentation(crop="pad", padding=3),
    "pad-flip": Augmentation(crop="pad", padding=2, flip=True),
    "resized": Augmentation(crop="resized"),
    "resized-flip": Augmentation(crop="resized", flip=True),
}


def array_source(count: int = 30, size: int = 8, channels: int = 1) -> ImageArray:
    images = np.stack(random_images(0, [(size, size)] * count, channels))
    return ImageArray("array", images, [i % 7 for i in range(count)])


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    """The two ways through the assembly: images in memory, and images read one at a time."""
    parquet = make_parquet(tmp_path_factory.mktemp("parquet"), MANY_SIZES, 0)
    return {
        "array": array_source(11),
        "colour-array": array_source(11, channels=3),
        "array-of-another-size": array_source(11, size=13),
        "many-sizes": open_source("parquet", parquet.path, "train", memory_limit_bytes=0),
        "generated": open_source("generated", None, "train", num_images=11, memory_limit_bytes=0),
    }


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["array", "colour-array", "array-of-another-size", "many-sizes", "generated"])
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**64 - 1),
    drawn=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 10)), min_size=1, max_size=9),
)
def test_a_training_image_does_not_depend_on_its_company(
    sources: dict[str, Source], name: str, policy: str, seed: int, drawn: list[tuple[int, int]]
) -> None:
    source = sources[name]
    epochs, samples = np.array(drawn).T
    images, labels = assemble_training(source, POLICIES[policy], 8, seed, epochs, samples)
    assert images.shape == (len(drawn), 8, 8, source.channels)
    assert images.dtype == np.uint8
    assert images.flags.c_contiguous
    assert images.flags.writeable
    assert labels.dtype == np.int64
    assert labels.flags.writeable
    for at, (epoch, sample) in enumerate(drawn):
        alone, label = assemble_training(source, POLICIES[policy], 8, seed, epoch, np.array([sample]))
        np.testing.assert_array_equal(images[at], alone[0])
        assert labels[at] == label[0] == source.labels[sample]


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "none"])
def test_seed_and_epoch_matter(policy: str) -> None:
    source, samples = array_source(), np.arange(30)
    first, _ = assemble_training(source, POLICIES[policy], 8, 0, 0, samples)
    for seed, epoch in ((0, 1), (1, 0)):
        other, _ = assemble_training(source, POLICIES[policy], 8, seed, epoch, samples)
        assert (first != other).any(axis=(1, 2, 3)).sum() > 5


def test_pad_policy_against_its_parts() -> None:
    source, samples = array_source(channels=3), np.array([4, 4, 29, 0])
    epochs = np.array([0, 1, 0, 0])
    images, labels = assemble_training(source, POLICIES["pad-flip"], 8, 5, epochs, samples)
    expected = pad_crop_flip(source.images[samples], 2, True, keyed_uniforms(5, epochs, samples, 3))
    np.testing.assert_array_equal(images, expected)
    assert labels.tolist() == [4, 4, 1, 0]


def test_resized_policy_against_its_parts(sources: dict[str, Source]) -> None:
    source, samples = sources["many-sizes"], np.arange(11)
    policy = POLICIES["resized-flip"]
    images, _ = assemble_training(source, policy, 6, 5, 2, samples)
    flips = 0
    for sample, got in enumerate(images):
        uniforms = keyed_uniforms(5, 2, np.array([sample]), 41)[0]
        image = source.read(sample)
        height, width, _ = image.shape
        box = resized_crop_box(height, width, policy, uniforms[1:])
        expected = resize(image, 6, 6, box)
        flips += uniforms[0] < 0.5
        np.testing.assert_array_equal(got, expected[:, ::-1] if uniforms[0] < 0.5 else expected)
    assert 0 < flips < 11


@pytest.mark.parametrize("policy", POLICIES)
def test_the_source_stays_as_it_is(policy: str) -> None:
    source = array_source()
    before = source.images.copy()
    images, labels = assemble_training(source, POLICIES[policy], 8, 0, 0, np.arange(30))
    images[:] = 0
    labels[:] = 0
    np.testing.assert_array_equal(source.images, before)
    assert source.labels.max() == 6


# --- evaluation ---


def test_evaluation_takes_images_of_the_right_size_as_they_are() -> None:
    source, indices = array_source(), np.array([3, 29, 3])
    images, labels = assemble_evaluation(source, 8, indices)
    np.testing.assert_array_equal(images, source.images[indices])
    assert images.flags.c_contiguous
    assert images.flags.writeable
    assert labels.tolist() == [3, 1, 3]


def reference_fit(image: NDArray[np.uint8], short: int, long: int, size: int) -> NDArray[np.uint8]:
    """A wide image scaled to short x long and its centre, by Pillow alone."""
    scaled = Image.fromarray(image).resize((long, short), Image.Resampling.BILINEAR)
    left, top = (long - size) // 2, (short - size) // 2
    return np.asarray(scaled.crop((left, top, left + size, top + size)))


def test_fit_scales_the_shorter_side_to_eight_sevenths_and_cuts_the_centre() -> None:
    image = random_images(1, [(300, 400)], 3)[0]
    np.testing.assert_array_equal(fit(image, 224), reference_fit(image, 256, 341, 224))
    np.testing.assert_array_equal(fit(image, 28), reference_fit(image, 32, 43, 28))
    tall = image.transpose(1, 0, 2).copy()
    assert fit(tall, 224).shape == (224, 224, 3)
    # An image whose halves differ: the cut is in the middle.
    halves = np.zeros((100, 300, 1), dtype=np.uint8)
    halves[:, 150:] = 200
    middle = fit(halves, 70)[..., 0]
    assert (middle[:, :34] == 0).all()
    assert (middle[:, 36:] == 200).all()


@pytest.mark.parametrize("shape", [(1, 1), (1, 50), (50, 1), (7, 9), (224, 225), (257, 256), (1000, 10)])
@pytest.mark.parametrize("size", [8, 31, 224])
def test_fit_works_for_every_shape(shape: tuple[int, int], size: int) -> None:
    assert fit(np.zeros((*shape, 3), dtype=np.uint8), size).shape == (size, size, 3)


def test_every_kind_can_be_assembled(image_set: ImageSet) -> None:
    source = open_source(image_set.kind, image_set.path, "train", **image_set.options)
    everything = np.arange(len(source))
    for size in (5, 12):
        images, labels = assemble_evaluation(source, size, everything)
        assert images.shape == (len(source), size, size, source.channels)
        assert labels.tolist() == image_set.labels["train"]
        for index in range(len(source)):
            np.testing.assert_array_equal(images[index], fit(source.read(index), size))
        for policy in POLICIES.values():
            trained, _ = assemble_training(source, policy, size, 0, 0, everything)
            assert trained.shape == images.shape


def test_an_unreadable_image_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path, MANY_SIZES, 0)
    (tmp_path / "train" / "bee" / "004.png").write_bytes(b"broken")
    source = open_source("folder", tmp_path, "train", memory_limit_bytes=0)
    for policy in POLICIES.values():
        with pytest.raises(DataError, match=r"cannot decode the image .*train/bee/004\.png"):
            assemble_training(source, policy, 8, 0, 0, np.array([0, 4, 1]))
    with pytest.raises(DataError, match=r"cannot decode the image .*train/bee/004\.png"):
        assemble_evaluation(source, 8, np.array([4]))


def test_real_images_in_memory_and_on_demand_agree(cifar10: Path, cifar10_val: Source) -> None:
    loaded = cifar10_val
    lazy = open_source("parquet", cifar10, "val", memory_limit_bytes=8 * 2**20)
    assert isinstance(loaded, ImageArray)
    assert not isinstance(lazy, ImageArray)
    samples = np.random.default_rng(0).integers(0, 10_000, 40)
    for policy in POLICIES.values():
        for size in (32, 24):
            first, labels = assemble_training(loaded, policy, size, 1, 2, samples)
            second, _ = assemble_training(lazy, policy, size, 1, 2, samples)
            np.testing.assert_array_equal(first, second)
            np.testing.assert_array_equal(labels, loaded.labels[samples])


@pytest.fixture
def images(tmp_path: Path) -> Source:
    make_folder(tmp_path, MANY_SIZES, 0)
    return open_source("folder", tmp_path, "train", memory_limit_bytes=0)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("begin", "end", "size"), [(0, 11, 4), (0, 11, 100), (2, 9, 1), (5, 5, 3)])
def test_every_image_once_and_in_order(images: Source, threads: int, begin: int, end: int, size: int) -> None:
    batches = list(evaluation_batches(images, 8, begin, end, size, LoaderSettings(threads=threads)))
    assert [len(labels) for _, labels in batches] == [min(size, end - at) for at in range(begin, end, size)]
    if batches:
        expected, labels = assemble_evaluation(images, 8, np.arange(begin, end))
        np.testing.assert_array_equal(np.concatenate([p for p, _ in batches]), expected)
        assert np.concatenate([found for _, found in batches]).tolist() == labels.tolist()


def test_a_broken_image_is_grey_under_its_own_label(images: Source, tmp_path: Path) -> None:
    (tmp_path / "train" / "bee" / "005.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"005.png"):
        list(evaluation_batches(images, 8, 0, 11, 4, LoaderSettings(threads=2)))
    log = BrokenLog(0.01, tmp_path / "broken.jsonl", images.name)
    found = list(evaluation_batches(images, 8, 0, 11, 4, LoaderSettings(threads=2, broken=log)))
    shown, labels = found[1]
    assert (shown[1] == GREY).all()
    assert (shown[0] != GREY).any()
    assert labels[1] == 1
    assert (log.num_broken, log.num_read) == (1, 11)
    assert "005.png" in (tmp_path / "broken.jsonl").read_text()


def test_leaving_early_ends_the_threads(images: Source) -> None:
    batches = evaluation_batches(images, 8, 0, 11, 1, LoaderSettings(threads=3))
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("evaluation")]


def test_by_default_pixels_are_exact_and_no_broken_image_is_tolerated() -> None:
    one, other = LoaderSettings(), LoaderSettings()
    assert one.decoding == EXACT
    assert one.broken.max_share == 0
    assert one.broken is not other.broken  # each counts for itself


def some(*indices: int) -> list[Broken]:
    return [Broken(index, f"image {index}", "it is cut short") for index in indices]


def test_each_image_is_listed_once(tmp_path: Path) -> None:
    log = BrokenLog(0.5, tmp_path / "a" / "broken.jsonl", "set")
    log.note(10, [])
    assert not (tmp_path / "a").exists()
    log.note(10, some(3, 4))
    log.note(10, some(4, 9))
    lines = [json.loads(line) for line in (tmp_path / "a" / "broken.jsonl").read_text().splitlines()]
    assert lines == [
        {"set": "set", "index": index, "name": f"image {index}", "reason": "it is cut short"} for index in (3, 4, 9)
    ]
    assert (log.num_read, log.num_broken) == (30, 4)


def test_the_share_is_taken_of_no_few_images() -> None:
    log = BrokenLog(0.001)
    allowed = int(0.001 * JUDGED_OVER_IMAGES)
    log.note(10, some(*range(allowed)))
    with pytest.raises(
        DataError, match=rf"{allowed + 1} of 20 images read were broken, data.max_broken_share allows 0.001"
    ):
        log.note(10, some(100))
    late = BrokenLog(0.001)
    late.note(10 * JUDGED_OVER_IMAGES, some(*range(10 * allowed)))
    with pytest.raises(DataError, match=f"{10 * allowed + 1} of"):
        late.note(0, some(7))


def test_none_is_allowed_with_zero_and_all_with_one() -> None:
    with pytest.raises(DataError, match=r"1 of 5 images read were broken, .*; the last: it is cut short"):
        BrokenLog(0.0).note(5, some(1))
    BrokenLog(1.0).note(5, some(*range(5)))


def test_a_list_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*; make room there"):
        BrokenLog(0.5, tmp_path / "file" / "broken.jsonl").note(5, some(1))
