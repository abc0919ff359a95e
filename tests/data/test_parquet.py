from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from megabatch.data import parquet
from megabatch.data.formats import open_source
from megabatch.data.parquet import ParquetImages, choose_files, open_parquet
from megabatch.data.sources import ImageArray, Source, Split
from megabatch.errors import DataError
from tests.data.conftest import MANY_SIZES, make_parquet, png_bytes, random_images, write_parquet

PNG = png_bytes(np.arange(27, dtype=np.uint8).reshape(3, 3, 3))


@pytest.mark.parametrize(
    ("names", "split", "chosen"),
    [
        (["train-0", "train-1", "test-0"], "train", ["train-0", "train-1"]),
        (["train-0", "train-1", "test-0"], "val", ["test-0"]),
        (["train-0", "test-0", "val-0", "val-1"], "val", ["val-0", "val-1"]),
        (["train-0", "test-0", "validation-0"], "val", ["validation-0"]),
        (["train", "test"], "val", ["test"]),
        (["photos-1", "photos-0"], "train", ["photos-0", "photos-1"]),
        (["photos-1", "photos-0"], "val", ["photos-0", "photos-1"]),
        (["0000", "0001"], "train", ["0000", "0001"]),
        (["training_set-0", "train-0"], "train", ["train-0"]),
    ],
)
def test_files_of_a_split(tmp_path: Path, names: list[str], split: Split, chosen: list[str]) -> None:
    for name in names:
        (tmp_path / f"{name}.parquet").touch()
    files, _ = choose_files(tmp_path, split)
    assert [file.stem for file in files] == chosen


@pytest.mark.parametrize(
    ("names", "split", "message"),
    [
        ([], "train", r"has no \*\.parquet files"),
        (["train-0"], "val", r"has no validation-\*.* or test-\*\.parquet \(found: train-0\.parquet\)"),
        (["test-0"], "train", r"has no train-\*\.parquet \(found: test-0\.parquet\)"),
        (["photos-0", "more-0"], "train", r"\(found: more-0\.parquet, photos-0\.parquet\)"),
        (["photos-0", "train-0"], "val", r"has no validation"),
    ],
)
def test_no_clear_choice(tmp_path: Path, names: list[str], split: Split, message: str) -> None:
    for name in names:
        (tmp_path / f"{name}.parquet").touch()
    with pytest.raises(DataError, match=message):
        choose_files(tmp_path, split)


def test_one_file_can_be_given(tmp_path: Path) -> None:
    write_parquet(tmp_path / "photos.parquet", [PNG, PNG], [0, 1])
    source = open_parquet(tmp_path / "photos.parquet", "train")
    assert source.name == "photos photos"
    assert len(source) == 2


def test_other_column_names(tmp_path: Path) -> None:
    image = pa.array([{"bytes": PNG}] * 2, type=pa.struct([("bytes", pa.binary())]))
    pq.write_table(pa.table({"img": image, "fine": [0, 1]}), tmp_path / "train-0.parquet")
    source = open_parquet(tmp_path, "train", image_column="img", label_column="fine")
    assert source.labels.tolist() == [0, 1]


IMAGES = pa.array([{"bytes": PNG, "path": None}] * 2)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"label": [0, 1]}, r"no column 'image: struct\{bytes, path\}' \(found: label: int64\)"),
        ({"image": [PNG, PNG], "label": [0, 1]}, r"no column 'image: struct.* \(found: image: binary"),
        ({"image": IMAGES}, "no column 'label' of integers"),
        ({"image": IMAGES, "label": ["a", "b"]}, r"no column 'label' of integers \(found: .* label: string\)"),
        ({"image": IMAGES, "label": [1, None]}, "label at index 1 of .* is missing"),
        ({"image": IMAGES, "label": [0, -1]}, "label at index 1 of .* is -1"),
        ({"image": IMAGES, "label": [0, 2**40]}, f"label at index 1 of .* is {2**40}"),
        ({"image": pa.array([{"bytes": "x"}] * 2), "label": [0, 1]}, "no column 'image: struct"),
    ],
)
def test_wrong_columns(tmp_path: Path, table: dict[str, Any], message: str) -> None:
    pq.write_table(pa.table(table), tmp_path / "train-0.parquet")
    with pytest.raises(DataError, match=message):
        open_parquet(tmp_path, "train")


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    labels = pa.array([0, 1])
    for columns, names in (([IMAGES, labels, labels], "ill"), ([IMAGES, IMAGES, labels], "iil")):
        words = [{"i": "image", "l": "label"}[one] for one in names]
        pq.write_table(pa.Table.from_arrays(columns, words), tmp_path / "train-0.parquet")
        with pytest.raises(DataError, match=f"has 2 columns '{words[1]}'"):
            open_parquet(tmp_path, "train")


def test_no_rows(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-0.parquet", [], pa.array([], type=pa.int64()))
    with pytest.raises(DataError, match="has no images"):
        open_parquet(tmp_path, "train")


def test_not_a_parquet_file(tmp_path: Path) -> None:
    (tmp_path / "train-0.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(DataError, match=r"cannot read .*train-0\.parquet as parquet"):
        open_parquet(tmp_path, "train")


def test_broken_images_are_named_by_row_and_file(tmp_path: Path) -> None:
    out = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(out, "JPEG")
    write_parquet(tmp_path / "train-0.parquet", [PNG] * 4, [0] * 4)
    encoded: list[bytes | None] = [PNG, PNG, PNG, PNG, out.getvalue()[:300], PNG, None]
    write_parquet(tmp_path / "train-1.parquet", encoded, [0] * 7)
    source = open_parquet(tmp_path, "train")
    source.read(7)
    with pytest.raises(DataError, match=r"cannot decode the image in row 4 of .*train-1\.parquet: .*[Tt]runcated"):
        source.read(8)
    with pytest.raises(DataError, match=r"image in row 6 of .*train-1\.parquet has no bytes"):
        source.read(10)


def test_cached_row_groups_stay_within_the_limit(tmp_path: Path) -> None:
    made = make_parquet(tmp_path, MANY_SIZES, 0)
    assert made.images is not None
    group_bytes = sum(len(png_bytes(p)) for p in made.images["train"][:3])
    files, _ = choose_files(tmp_path, "train")
    source = ParquetImages(
        "x",
        files,
        channels=3,
        num_classes=None,
        image_column="image",
        label_column="label",
        memory_limit_bytes=2 * group_bytes,
    )
    for index in np.random.default_rng(0).integers(0, 11, 200).tolist():
        np.testing.assert_array_equal(source.read(index), made.images["train"][index])
        held = sum(group.nbytes for group in source._cached.values())
        assert source._cached_bytes == held
        assert held <= 2 * group_bytes or len(source._cached) == 1


def test_a_vanished_file_is_named(tmp_path: Path) -> None:
    make_parquet(tmp_path, MANY_SIZES, 0)
    source = open_parquet(tmp_path, "train")
    (tmp_path / "train-00001-of-00002.parquet").unlink()
    with pytest.raises(DataError, match=r"cannot read row group 2 of .*train-00001-of-00002\.parquet"):
        source.read(10)


def test_many_rows_in_odd_row_groups(tmp_path: Path) -> None:
    images = random_images(5, [(4, 4)] * 601, 3)
    write_parquet(tmp_path / "train-0.parquet", [png_bytes(p) for p in images], [i % 7 for i in range(601)], 13)
    source = open_source("parquet", tmp_path, "train")
    assert isinstance(source, ImageArray)
    np.testing.assert_array_equal(source.images, np.stack(images))


def test_cifar10_test_images(cifar10: Path, cifar10_val: Source) -> None:
    source = cifar10_val
    assert isinstance(source, ImageArray)
    assert source.images.shape == (10_000, 32, 32, 3)
    assert np.bincount(source.labels).tolist() == [1000] * 10
    # The red, green and blue means of the CIFAR-10 test images, which the re-encoding hardly moves.
    means = source.images.mean(axis=(0, 1, 2)) / 255
    np.testing.assert_allclose(means, [0.494, 0.485, 0.450], atol=0.004)
    on_demand = open_parquet(cifar10, "val", memory_limit_bytes=4 * 2**20)
    assert isinstance(on_demand, ParquetImages)
    for index in (0, 999, 1000, 5432, 9999):
        np.testing.assert_array_equal(on_demand.read(index), source.read(index))


def test_photographs_of_many_sizes(real_data: Path) -> None:
    if not (real_data / "imagenet-photos").is_dir():
        pytest.skip(f"no imagenet-photos in {real_data}")
    source = open_parquet(real_data / "imagenet-photos", "train", num_classes=1000)
    assert isinstance(source, ParquetImages)
    assert source.labels.tolist() == sorted(set(source.labels.tolist()))
    assert len({source.read(index).shape for index in range(0, 240, 24)}) > 1


def test_the_index_is_cached_and_follows_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "train-0.parquet", [PNG] * 5, [0, 1, 2, 0, 1], 2)
    first = open_parquet(tmp_path, "train")
    with monkeypatch.context() as patch:
        patch.setattr(parquet, "_inspect", lambda *_: pytest.fail("the file was looked through again"))
        again = open_parquet(tmp_path, "train")
    assert again.labels.tolist() == first.labels.tolist() == [0, 1, 2, 0, 1]
    np.testing.assert_array_equal(again.read(4), first.read(4))
    write_parquet(tmp_path / "train-0.parquet", [PNG] * 6, [3] * 6, 2)
    assert open_parquet(tmp_path, "train").labels.tolist() == [3] * 6
