from __future__ import annotations

from pathlib import Path

import pytest

from megabatch.data.detect import detect_kind, open_splits
from megabatch.errors import ConfigError, DataError
from tests.data.conftest import MAKERS, png_bytes, random_images, write_parquet, write_tar

NAMES = ["idx-gz", "parquet-many-sizes", "folder-many-sizes", "tar-many-sizes", "raw-many-sizes"]


@pytest.mark.parametrize("name", NAMES)
def test_kinds_are_seen_by_their_files(tmp_path: Path, name: str) -> None:
    given = MAKERS[name](tmp_path)
    assert detect_kind(tmp_path) == given.kind
    splits = open_splits(tmp_path)
    assert [split for split, _ in splits] == ["train", "val"]
    assert [source.labels.tolist() for _, source in splits] == [given.labels["train"], given.labels["val"]]
    assert [split for split, _ in open_splits(tmp_path, None, "val")] == ["val"]


def test_a_set_without_splits_is_taken_once(tmp_path: Path) -> None:
    image = png_bytes(random_images(0, [(4, 4)], 3)[0])
    write_parquet(tmp_path / "photos-0.parquet", [image], [0])
    assert [split for split, _ in open_splits(tmp_path)] == ["train"]


def test_one_split_alone(tmp_path: Path) -> None:
    image = png_bytes(random_images(0, [(4, 4)], 3)[0])
    write_tar(tmp_path / "x-train-0.tar", [("a.png", image), ("a.cls", b"0")])
    assert [split for split, _ in open_splits(tmp_path)] == ["train"]
    with pytest.raises(DataError, match="no shard with validation"):
        open_splits(tmp_path, None, "val")


def test_damage_is_not_taken_for_a_missing_split(tmp_path: Path) -> None:
    MAKERS["tar-many-sizes"](tmp_path)
    shard = tmp_path / "set-val-0001.tar"
    shard.write_bytes(shard.read_bytes()[:600])
    with pytest.raises(DataError, match="is truncated"):
        open_splits(tmp_path)


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        detect_kind(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"holds no \*.tar, .*; name the kind with --source"):
        detect_kind(tmp_path)
    with pytest.raises(ConfigError, match="unknown data source 'tra'"):
        open_splits(tmp_path, "tra")
    with pytest.raises(ConfigError, match="split is 'test'"):
        open_splits(tmp_path, "tar", "test")
