from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megabatch.data.folder import open_folder
from megabatch.data.sources import ImageArray
from megabatch.errors import DataError
from tests.data.conftest import MANY_SIZES, ONE_SIZE, make_folder, png_bytes

IMAGE = np.arange(27, dtype=np.uint8).reshape(3, 3, 3)


def put(path: Path, content: bytes = png_bytes(IMAGE)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_extensions_in_any_case_and_sorted_names(tmp_path: Path) -> None:
    for name in ("b.JPEG", "a.png", "d.jpg", "c.Webp", "e.jpeg"):
        put(tmp_path / "train" / "x" / name, png_bytes(np.full((2, 2, 3), ord(name[0]), dtype=np.uint8)))
    for name in ("notes.txt", ".d.png", "png"):
        put(tmp_path / "train" / "x" / name, b"stray")
    source = open_folder(tmp_path, "train")
    assert [chr(source.read(i)[0, 0, 0]) for i in range(len(source))] == ["a", "b", "c", "d", "e"]


def test_classes_are_numbered_by_the_train_folders(tmp_path: Path) -> None:
    for place in ("train/ant/1.png", "train/bee/1.png", "train/cat/1.png", "val/cat/1.png", "val/bee/1.png"):
        put(tmp_path / place)
    val = open_folder(tmp_path, "val")
    assert val.labels.tolist() == [1, 2]
    assert val.num_classes == 3


def test_val_alone_can_be_opened(tmp_path: Path) -> None:
    put(tmp_path / "val" / "bee" / "1.png")
    assert open_folder(tmp_path, "val").num_classes == 1


def test_a_val_class_that_train_lacks(tmp_path: Path) -> None:
    for place in ("train/ant/1.png", "val/ant/1.png", "val/wasp/1.png"):
        put(tmp_path / place)
    with pytest.raises(DataError, match=r"wasp is no class of .*train; name the classes alike in both"):
        open_folder(tmp_path, "val")


def test_missing_split_tells_what_is_there(tmp_path: Path) -> None:
    put(tmp_path / "train" / "ant" / "1.png")
    put(tmp_path / "test" / "ant" / "1.png")
    with pytest.raises(DataError, match=r"has no val/<class>/ folders \(found: test, train\)"):
        open_folder(tmp_path, "val")


def test_split_without_class_folders(tmp_path: Path) -> None:
    put(tmp_path / "train" / "1.png")
    with pytest.raises(DataError, match="has no train/<class>/ folders"):
        open_folder(tmp_path, "train")


def test_class_without_images(tmp_path: Path) -> None:
    put(tmp_path / "train" / "ant" / "1.png")
    put(tmp_path / "train" / "bee" / "notes.txt")
    with pytest.raises(DataError, match=r"bee has no images \(\.jpg, \.jpeg, \.png, \.webp\)"):
        open_folder(tmp_path, "train")


def test_broken_and_vanished_images_are_named(tmp_path: Path) -> None:
    make_folder(tmp_path, MANY_SIZES, 0)
    put(tmp_path / "train" / "ant" / "002.png", b"broken")
    source = open_folder(tmp_path, "train", memory_limit_bytes=0)
    source.read(1)
    with pytest.raises(DataError, match=r"cannot decode the image .*train/ant/002\.png: cannot identify"):
        source.read(2)
    (tmp_path / "train" / "bee" / "005.png").unlink()
    with pytest.raises(DataError, match=r"cannot read the image .*train/bee/005\.png: No such file"):
        source.read(5)


def test_a_broken_image_in_a_small_set_is_named_when_it_is_read(tmp_path: Path) -> None:
    make_folder(tmp_path, ONE_SIZE, 0)
    assert isinstance(open_folder(tmp_path, "train"), ImageArray)
    put(tmp_path / "train" / "cat" / "009.png", b"broken")
    source = open_folder(tmp_path, "train")
    assert not isinstance(source, ImageArray)
    with pytest.raises(DataError, match=r"cannot decode the image .*train/cat/009\.png"):
        source.read(9)


def test_grey_on_request(tmp_path: Path) -> None:
    put(tmp_path / "train" / "ant" / "1.png")
    assert open_folder(tmp_path, "train", channels=1).read(0).shape == (3, 3, 1)
