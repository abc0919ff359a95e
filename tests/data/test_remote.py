"""Against fsspec's file system in memory, which behaves like an object store."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from megabatch.data.pack import Packing, pack
from megabatch.data.remote import BlockCache, RemoteFiles, is_remote, open_remote_tar
from megabatch.data.sources import open_source
from megabatch.errors import ConfigError, DataError
from tests.data.conftest import MANY_SIZES, ImageSet, make_tar


@pytest.fixture
def store() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/bucket", recursive=True) if system.exists("/bucket") else None


def upload(system: Any, folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_file():
            system.pipe_file(f"/bucket/set/{path.name}", path.read_bytes())


@pytest.fixture
def given(tmp_path: Path, store: Any) -> ImageSet:
    (tmp_path / "local").mkdir()
    made = make_tar(tmp_path / "local", MANY_SIZES, 0)
    upload(store, tmp_path / "local")
    return made


def opened(tmp_path: Path, **options: Any) -> Any:
    return open_remote_tar(
        "memory://bucket/set", "train", cache_folder=tmp_path / "cache", memory_limit_bytes=0, **options
    )


@pytest.mark.parametrize("block_bytes", [700, 10_000, 10**7])
def test_images_come_through_the_cache(tmp_path: Path, given: ImageSet, store: Any, block_bytes: int) -> None:
    source = opened(tmp_path, block_bytes=block_bytes)
    assert source.labels.tolist() == given.labels["train"]
    assert given.images is not None
    for index, expected in enumerate(given.images["train"]):
        np.testing.assert_array_equal(source.read(index), expected)
    store.rm("/bucket", recursive=True)
    for index, expected in enumerate(given.images["train"]):  # all of it is here now
        np.testing.assert_array_equal(source.read(index), expected)
    assert "memory://" in source.name_of(0)


def test_the_cache_keeps_its_limit_and_what_was_used_last(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, limit_bytes=1000)
    for number in range(9):
        cache.put(f"a/{number}", bytes([number]) * 100)
        os.utime(tmp_path / "a" / str(number), ns=(number, number))
    assert cache.get("a/0") == bytes(100)  # used again, so it stays
    time.sleep(0.01)
    cache.put("b/1", b"x" * 150)
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 900
    assert {"0", "8"} <= left
    assert cache.get("a/1") is None
    assert cache.get("b/1") == b"x" * 150


def test_a_small_cache_still_gives_all_images(tmp_path: Path, given: ImageSet) -> None:
    source = opened(tmp_path, block_bytes=512, cache_limit_bytes=2048)
    assert given.images is not None
    for _ in range(2):
        for index, expected in enumerate(given.images["train"]):
            np.testing.assert_array_equal(source.read(index), expected)
    kept = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert kept <= 2048 + 512


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path, given: ImageSet) -> None:
    (tmp_path / "file").write_text("in the way")
    source = open_remote_tar("memory://bucket/set", "val", cache_folder=tmp_path / "file", memory_limit_bytes=0)
    assert given.images is not None
    np.testing.assert_array_equal(source.read(4), given.images["val"][4])


def test_a_damaged_block_is_fetched_again(tmp_path: Path, given: ImageSet) -> None:
    source = opened(tmp_path)
    source.read(0)
    for path in (tmp_path / "cache").rglob("*"):
        if path.is_file():
            path.write_bytes(b"short")
    assert given.images is not None
    np.testing.assert_array_equal(source.read(0), given.images["train"][0])


def test_the_index_beside_the_shards_is_used(
    tmp_path: Path, given: ImageSet, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = open_source("tar", given.path, "train", memory_limit_bytes=0)
    pack(local, tmp_path / "packed", "train", Packing(images_per_shard=4), 1)
    store.rm("/bucket", recursive=True)
    upload(store, tmp_path / "packed")
    with monkeypatch.context() as patch:
        patch.setattr("megabatch.data.remote.index_shards", lambda storage: pytest.fail("headers were read"))
        source = opened(tmp_path)
    np.testing.assert_array_equal(source.read(9), local.read(9))


def test_mistakes(tmp_path: Path, store: Any) -> None:
    with pytest.raises(DataError, match="does not exist or cannot be listed"):
        open_remote_tar("memory://nowhere/x", "train")
    store.pipe_file("/bucket/empty/readme.txt", b"")
    with pytest.raises(DataError, match=r"has no \*.tar files"):
        open_remote_tar("memory://bucket/empty", "train")
    with pytest.raises(ConfigError, match="no file system for nosuch:// addresses"):
        open_remote_tar("nosuch://x", "train")
    store.pipe_file("/bucket/set/a-train-0.tar", b"x" * 600)
    storage = RemoteFiles("memory", ["/bucket/set/a-train-0.tar"], BlockCache(tmp_path))
    store.rm("/bucket", recursive=True)
    with pytest.raises(DataError, match=r"cannot read memory:///bucket/set/a-train-0.tar: FileNotFoundError"):
        storage.read_at(0, 0, 10)
    assert is_remote("s3://a/b")
    assert not is_remote("/data/x")
