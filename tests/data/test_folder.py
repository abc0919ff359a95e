from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from megabatch.data.folder import FolderImages
from megabatch.data.formats import detect_kind, open_source
from megabatch.data.sources import ImageArray, Split
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
    source = FolderImages(tmp_path, "train")
    assert [chr(source.read(i)[0, 0, 0]) for i in range(len(source))] == ["a", "b", "c", "d", "e"]


def test_classes_are_numbered_by_the_train_folders(tmp_path: Path) -> None:
    for place in ("train/ant/1.png", "train/bee/1.png", "train/cat/1.png", "val/cat/1.png", "val/bee/1.png"):
        put(tmp_path / place)
    val = FolderImages(tmp_path, "val")
    assert val.labels.tolist() == [1, 2]
    assert val.num_classes == 3


def test_val_alone_can_be_opened(tmp_path: Path) -> None:
    put(tmp_path / "val" / "bee" / "1.png")
    assert FolderImages(tmp_path, "val").num_classes == 1


def test_a_val_class_that_train_lacks(tmp_path: Path) -> None:
    for place in ("train/ant/1.png", "val/ant/1.png", "val/wasp/1.png"):
        put(tmp_path / place)
    with pytest.raises(DataError, match=r"wasp is no class of .*train; name the classes alike in both"):
        FolderImages(tmp_path, "val")


def test_missing_split_tells_what_is_there(tmp_path: Path) -> None:
    put(tmp_path / "train" / "ant" / "1.png")
    put(tmp_path / "test" / "ant" / "1.png")
    with pytest.raises(DataError, match=r"has no val/<class>/ folders \(found: 'test', 'train'\)"):
        FolderImages(tmp_path, "val")


def test_split_without_class_folders(tmp_path: Path) -> None:
    put(tmp_path / "train" / "1.png")
    with pytest.raises(DataError, match="has no train/<class>/ folders"):
        FolderImages(tmp_path, "train")


def test_class_without_images(tmp_path: Path) -> None:
    put(tmp_path / "train" / "ant" / "1.png")
    put(tmp_path / "train" / "bee" / "notes.txt")
    with pytest.raises(DataError, match=r"bee has no images \(\.jpg, \.jpeg, \.png, \.webp\)"):
        FolderImages(tmp_path, "train")


def test_all_classes_without_images_are_named(tmp_path: Path) -> None:
    put(tmp_path / "train" / "ant" / "1.png")
    for name in ("bee", "wasp"):
        (tmp_path / "train" / name).mkdir()
        (tmp_path / "flat" / name).mkdir(parents=True)
    with pytest.raises(DataError, match=r"train has 2 class folders without images .*: 'bee', 'wasp'; fill them"):
        FolderImages(tmp_path, "train")
    with pytest.raises(DataError, match=r"flat has 2 folders and no image .* in any of them: 'bee', 'wasp'; put the"):
        detect_kind(tmp_path / "flat")


def test_broken_and_vanished_images_are_named(tmp_path: Path) -> None:
    make_folder(tmp_path, MANY_SIZES, 0)
    put(tmp_path / "train" / "ant" / "002.png", b"broken")
    source = FolderImages(tmp_path, "train")
    source.read(1)
    with pytest.raises(DataError, match=r"cannot decode the image .*train/ant/002\.png: cannot identify"):
        source.read(2)
    (tmp_path / "train" / "bee" / "005.png").unlink()
    with pytest.raises(DataError, match=r"cannot read the image .*train/bee/005\.png: No such file"):
        source.read(5)


def test_a_broken_image_in_a_small_set_is_named_when_it_is_read(tmp_path: Path) -> None:
    make_folder(tmp_path, ONE_SIZE, 0)
    assert isinstance(open_source("folder", tmp_path, "train"), ImageArray)
    put(tmp_path / "train" / "cat" / "009.png", b"broken")
    source = open_source("folder", tmp_path, "train")
    assert not isinstance(source, ImageArray)
    with pytest.raises(DataError, match=r"cannot decode the image .*train/cat/009\.png"):
        source.read(9)


def test_grey_on_request(tmp_path: Path) -> None:
    put(tmp_path / "train" / "ant" / "1.png")
    assert FolderImages(tmp_path, "train", channels=1).read(0).shape == (3, 3, 1)


def test_a_folder_of_class_folders_is_split_by_names_alone(tmp_path: Path) -> None:
    def names(split: Split) -> set[str]:
        source = FolderImages(tmp_path, split)
        return {source.name_of(index) for index in range(len(source))}

    for class_name in ("ant", "bee"):
        (tmp_path / class_name).mkdir()
        for number in range(10):
            (tmp_path / class_name / f"{number}.jpg").write_bytes(b"x")
    train, val = names("train"), names("val")
    assert (len(train), len(val)) == (16, 4)
    assert not train & val
    by_hash = sorted(range(10), key=lambda n: hashlib.sha256(f"ant/{n}.jpg".encode()).hexdigest())[:2]
    assert {str(tmp_path / "ant" / f"{n}.jpg") for n in by_hash} == {name for name in val if "ant" in name}
    assert FolderImages(tmp_path, "val").class_names == ("ant", "bee")
    (tmp_path / "ant" / "new.jpg").write_bytes(b"x")
    assert len(names("val") ^ val) <= 2
