"""What is found in a set, and what its manifest guards."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megabatch.data.formats import open_source
from megabatch.data.sources import Source
from megabatch.data.verify import check_manifest, compare_checksums, manifest_path, verify, write_manifest
from megabatch.errors import DataError
from tests.data.conftest import MAKERS, MANY_SIZES, ImageSet, make_folder, make_tar, png_bytes, random_images, write_tar


@pytest.mark.parametrize("jobs", [1, 3])
def test_broken_images_and_empty_classes_are_found(tmp_path: Path, jobs: int) -> None:
    make_folder(tmp_path, MANY_SIZES, 0)
    (tmp_path / "train" / "bee" / "004.png").write_bytes(b"")
    (tmp_path / "train" / "cat" / "010.png").write_bytes(b"half an image")
    source = open_source("folder", tmp_path, "train", memory_limit_bytes=0, num_classes=5)
    done: list[int] = []
    findings = verify(source, jobs, done.append)
    assert [one.index for one in findings.broken] == [4, 10]
    assert findings.broken[0].name.endswith("bee/004.png")
    assert findings.class_counts.tolist() == [4, 5, 2, 0, 0]
    assert findings.as_table()["empty_classes"] == [3, 4]
    assert sum(done) == findings.num_images == 11
    sizes = [size for number, size in enumerate(MANY_SIZES["train"]) if number not in (4, 10)]
    assert findings.smallest == min(sizes, key=lambda s: s[0] * s[1])
    assert findings.largest == max(sizes, key=lambda s: s[0] * s[1])


def test_whole_sets_of_every_kind(image_set: ImageSet) -> None:
    source = open_source(image_set.kind, image_set.path, "train", **image_set.options)
    findings = verify(source, 2)
    assert findings.broken == ()
    assert findings.class_counts.sum() == len(source)


def opened(folder: Path, kind: str = "tar") -> Source:
    options = {} if kind == "raw" else {"memory_limit_bytes": 0}
    return open_source(kind, folder, "train", **options)


def written(folder: Path, kind: str = "tar") -> None:
    source = opened(folder, kind)
    write_manifest(kind, folder, "train", source, verify(source, 1))


@pytest.mark.parametrize("name", ["tar-many-sizes", "parquet-many-sizes", "raw-many-sizes", "folder-many-sizes"])
def test_a_set_that_is_as_it_was(tmp_path: Path, name: str) -> None:
    kind = MAKERS[name](tmp_path).kind
    assert check_manifest(kind, tmp_path, "train", opened(tmp_path, kind)) == ""  # none there yet
    written(tmp_path, kind)
    assert "11 images as verified" in check_manifest(kind, tmp_path, "train", opened(tmp_path, kind))
    assert compare_checksums(kind, tmp_path, "train") == (0 if kind == "folder" else 2)


def change_a_label(folder: Path) -> None:
    path = folder / "set-train-0000.tar"
    content = path.read_bytes()
    at = content.index(b"0000.cls") + 512
    assert content[at : at + 1] == b"0"
    path.write_bytes(content[:at] + b"1" + content[at + 1 :])
    os.utime(path, ns=(0, 1))


def lose_a_shard(folder: Path) -> None:
    (folder / "set-train-0001.tar").unlink()


def add_a_shard(folder: Path) -> None:
    image = png_bytes(random_images(5, [(4, 4)], 3)[0])
    write_tar(folder / "set-train-0002.tar", [("a.png", image), ("a.cls", b"1")])


def rename_a_shard(folder: Path) -> None:
    (folder / "set-train-0001.tar").rename(folder / "set-train-0003.tar")


def change_the_end(folder: Path) -> None:
    path = folder / "set-train-0001.tar"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"x")  # behind the end mark: no image and no label differs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_a_label, "checksum of the labels differs"),
        (lose_a_shard, r"number of images differs .*\(4, the manifest says 11\)"),
        (add_a_shard, "number of images differs"),
        (rename_a_shard, "list of files differs"),
        (change_the_end, "checksum of the ends of set-train-0001.tar differs"),
    ],
)
def test_what_changed_is_said(tmp_path: Path, change: Callable[[Path], None], message: str) -> None:
    make_tar(tmp_path, MANY_SIZES, 0)
    written(tmp_path)
    change(tmp_path)
    with pytest.raises(DataError, match=rf"{message}.*restore the set, or write the manifest again"):
        check_manifest("tar", tmp_path, "train", opened(tmp_path))


def test_a_change_in_the_middle_is_found_by_whole_checksums(tmp_path: Path) -> None:
    members = [
        (f"{i}.{suffix}", b"1" * (1 if suffix == "cls" else 90_000)) for i in range(4) for suffix in ("jpg", "cls")
    ]
    write_tar(tmp_path / "train-0.tar", members)
    source = opened(tmp_path)
    write_manifest("tar", tmp_path, "train", source, verify(source, 1))
    assert compare_checksums("tar", tmp_path, "train") == 1
    content = bytearray((tmp_path / "train-0.tar").read_bytes())
    content[180_000] ^= 1
    (tmp_path / "train-0.tar").write_bytes(content)
    check_manifest("tar", tmp_path, "train", opened(tmp_path))
    with pytest.raises(DataError, match=r"the checksum of train-0.tar differs"):
        compare_checksums("tar", tmp_path, "train")


def test_damaged_missing_and_other_manifests(tmp_path: Path) -> None:
    make_folder(tmp_path, MANY_SIZES, 0)
    with pytest.raises(DataError, match="write it with `megabatch data verify` first"):
        compare_checksums("folder", tmp_path, "train")
    written(tmp_path, "folder")
    manifest_path(tmp_path, "train").write_text("{}")
    with pytest.raises(DataError, match="cannot read the manifest"):
        check_manifest("folder", tmp_path, "train", opened(tmp_path, "folder"))
