from __future__ import annotations

import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from megabatch.data import shards
from megabatch.data.shards import index_shards, open_tar, split_of_names
from megabatch.data.sources import Source, image_name
from megabatch.data.storage import LocalFiles
from megabatch.errors import DataError
from tests.data.conftest import png_bytes, random_images, write_tar

IMAGE = random_images(3, [(6, 7)], 3)[0]
ENCODED = png_bytes(IMAGE)


def opened(folder: Path, *members: tuple[str, bytes]) -> Source:
    write_tar(folder / "train-0.tar", list(members))
    return open_tar(folder, "train", memory_limit_bytes=0)


def test_keys_labels_and_strangers(tmp_path: Path) -> None:
    source = opened(
        tmp_path,
        ("n01/a.b.png", ENCODED),  # webdataset cuts at the first dot: key n01/a, suffix b.png
        ("n01/x.PNG", ENCODED),
        ("n01/x.CLS", b" 4 \n"),
        ("n02/x.cls", b"1"),
        ("n02/x.txt", b"caption"),
        ("n02/x.jpeg", ENCODED),
        ("readme.md", b"hello"),
        (".hidden", b"hello"),
        ("y.json", b'{"cls": 2}'),
        ("y.webp", ENCODED),
    )
    assert source.labels.tolist() == [4, 1, 2]
    assert [image_name(source, i).split(" in ")[0] for i in range(3)] == ["n01/x.PNG", "n02/x.jpeg", "y.webp"]
    assert image_name(source, 0).endswith("train-0.tar")
    for index in range(3):
        np.testing.assert_array_equal(source.read(index), IMAGE)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.png", ENCODED)], "sample 'a' has no .cls or .json member"),
        ([("a.cls", b"1")], "sample 'a' has 0 images, one is needed"),
        ([("a.png", ENCODED), ("a.jpg", ENCODED), ("a.cls", b"1")], "sample 'a' has 2 images"),
        ([("a.png", ENCODED), ("a.cls", b"cat")], "sample 'a' has the label 'cat' in .cls; an integer from 0"),
        ([("a.png", ENCODED), ("a.cls", b"")], "sample 'a' has the label '' in .cls"),
        ([("a.png", ENCODED), ("a.cls", b"\xff\xfe")], "sample 'a' has the label"),
        ([("a.png", ENCODED), ("a.json", b'{"label": 1.5}')], "in .json; an integer"),
        ([("a.png", ENCODED), ("a.json", b'{"label": true}')], "in .json; an integer"),
        ([("a.png", ENCODED), ("a.json", b"[3]")], "in .json; an integer"),
        ([("a.png", ENCODED), ("a.json", b'{"class": 1')], "in .json; an integer"),
        ([("a.png", ENCODED), ("a.cls", b"-1")], "label at index 0 .* is -1"),
        ([("a.txt", b"text")], "has no images"),
        # The label of another image between the two: the shard was not sorted by name.
        ([("a.png", ENCODED), ("b.cls", b"1"), ("b.png", ENCODED), ("a.cls", b"1")], "sample 'a' has no .cls"),
    ],
)
def test_wrong_shards_are_explained(tmp_path: Path, members: list[tuple[str, bytes]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        opened(tmp_path, *members)


def test_a_truncated_shard_is_refused_at_the_start(tmp_path: Path) -> None:
    opened(tmp_path, ("a.png", ENCODED), ("a.cls", b"1"))
    content = (tmp_path / "train-0.tar").read_bytes()
    (tmp_path / "train-0.tar").write_bytes(content[:700])
    with pytest.raises(DataError, match=r"train-0.tar is truncated: .*; fetch it again"):
        open_tar(tmp_path, "train")


def test_the_index_is_cached_and_follows_the_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(opened(tmp_path, ("a.png", ENCODED), ("a.cls", b"1"))) == 1
    with monkeypatch.context() as patch:
        patch.setattr(shards, "index_shards", lambda storage: pytest.fail("the index was made again"))
        assert len(open_tar(tmp_path, "train", memory_limit_bytes=0)) == 1
    changed = opened(tmp_path, ("a.png", ENCODED), ("a.cls", b"1"), ("b.png", ENCODED), ("b.cls", b"0"))
    assert changed.labels.tolist() == [1, 0]
    # The same size and another date: somebody wrote the file anew.
    write_tar(tmp_path / "train-0.tar", [("a.png", ENCODED), ("a.cls", b"3"), ("b.png", ENCODED), ("b.cls", b"2")])
    os.utime(tmp_path / "train-0.tar", ns=(0, 12345))
    assert open_tar(tmp_path, "train", memory_limit_bytes=0).labels.tolist() == [3, 2]


def test_many_shards_are_in_the_order_of_their_names(tmp_path: Path) -> None:
    for number in reversed(range(12)):
        members = [
            (f"{i}.png", ENCODED) if part else (f"{i}.cls", b"%d" % (10 * number + i))
            for i in range(3)
            for part in (0, 1)
        ]
        write_tar(tmp_path / f"x-{number:02}.tar", members, tarfile.PAX_FORMAT)
    index = index_shards(LocalFiles(sorted(tmp_path.glob("*.tar"))))
    assert index.labels.tolist() == [10 * number + i for number in range(12) for i in range(3)]
    assert index.shards.tolist() == [number for number in range(12) for _ in range(3)]


def test_one_file_serves_as_a_set(tmp_path: Path) -> None:
    opened(tmp_path, ("a.png", ENCODED), ("a.cls", b"1"))
    assert len(open_tar(tmp_path / "train-0.tar", "train")) == 1
    with pytest.raises(DataError, match="no shard with validation or valid or val or test"):
        open_tar(tmp_path / "train-0.tar", "val")


def test_names_decide_the_split() -> None:
    both = ["imagenet-train-000.tar", "imagenet-train-001.tar", "imagenet-validation-000.tar"]
    assert split_of_names(both, "train", "x") == set(both[:2])
    assert split_of_names(both, "val", "x") == {both[2]}
    assert split_of_names(["trainer-0.tar", "a-1.tar"], "val", "x") == {"trainer-0.tar", "a-1.tar"}
    assert split_of_names(["a-val-0.tar", "a-test-0.tar"], "val", "x") == {"a-val-0.tar"}
    with pytest.raises(DataError, match="x has no shard with train or training in its name"):
        split_of_names(["a-val-0.tar"], "train", "x")


def test_real_shards(real_data: Path) -> None:
    if not (real_data / "imagenette224").is_dir():
        pytest.skip(f"no imagenette224 in {real_data}")
    val = open_tar(real_data / "imagenette224", "val", memory_limit_bytes=0)
    assert len(val) == 2 * 982
    assert (val.num_classes, val.read(1963).shape) == (10, (224, 224, 3))
    assert len(open_tar(real_data / "imagenette224", "train", memory_limit_bytes=0)) == 4 * 1184
