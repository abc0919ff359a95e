from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from megabatch.data.formats import detect_kind, open_source, open_splits
from megabatch.data.sources import MissingSplitError, Split
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
    write_tar(shard, [("a.png", b"x")])
    with pytest.raises(DataError, match=r"has no .cls or .json member"):
        open_splits(tmp_path)
    shard.write_bytes(b"x" * 2048)
    with pytest.raises(DataError, match="has no tar header"):
        open_splits(tmp_path)


def test_an_empty_class_is_not_taken_for_a_missing_split(tmp_path: Path) -> None:
    MAKERS["folder-many-sizes"](tmp_path)
    (tmp_path / "val" / "bee").mkdir()
    with pytest.raises(DataError, match="has no images"):
        open_splits(tmp_path)


@pytest.mark.parametrize("kind", ["parquet", "raw", "folder"])
def test_a_missing_split_of_every_kind(tmp_path: Path, kind: str) -> None:
    MAKERS[f"{kind}-many-sizes"](tmp_path)
    for path in (*tmp_path.glob("test-*"), *tmp_path.glob("val-*"), *tmp_path.glob("val")):
        path.rename(tmp_path.parent / f"{tmp_path.name}-{path.name}")
    assert [split for split, _ in open_splits(tmp_path)] == ["train"]
    with pytest.raises(MissingSplitError, match="has no"):
        open_splits(tmp_path, kind, "val")


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        detect_kind(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"holds no \*.tar, .*, or name the kind: --source"):
        detect_kind(tmp_path)
    with pytest.raises(ConfigError, match="unknown data source 'tra'"):
        open_splits(tmp_path, "tra")
    with pytest.raises(ConfigError, match="split is 'test'"):
        open_splits(tmp_path, "tar", "test")


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


def test_remote_addresses_are_for_tar_alone() -> None:
    with pytest.raises(ConfigError, match=r"s3://bucket/x is a remote address, which only tar shards can be read from"):
        open_source("parquet", "s3://bucket/x", "train")
