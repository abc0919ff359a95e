"""Files on this machine, and files in an object store behind a cache."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from megabatch.data import storage as module
from megabatch.data.formats import open_source
from megabatch.data.pack import Packing, pack
from megabatch.data.shards import open_remote_tar
from megabatch.data.storage import BlockCache, LocalFiles, RemoteFiles, is_remote
from megabatch.errors import ConfigError, DataError
from tests.data.conftest import MANY_SIZES, ImageSet, make_tar


def three(folder: Path) -> tuple[list[Path], list[bytes]]:
    contents = [os.urandom(1000 + i) for i in range(3)]
    paths = [folder / f"{i}.bin" for i in range(3)]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths, contents


@pytest.mark.parametrize("most_open", [0, 1, 512])
def test_ranges_from_many_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_open: int) -> None:
    monkeypatch.setattr(module, "MAX_OPEN_FILES", most_open)
    paths, contents = three(tmp_path)
    storage = LocalFiles(paths)
    ranges = [(i % 3, i * 7 % 900, 1 + i % 90) for i in range(300)]
    with ThreadPoolExecutor(4) as pool:
        for (file, start, count), got in zip(ranges, pool.map(lambda r: storage.read_at(*r), ranges), strict=True):
            assert got == contents[file][start : start + count]
    assert storage.read_at(1, 990, 100) == contents[1][990:]
    assert storage.place(2) == str(paths[2])
    assert [stamp.num_bytes for stamp in storage.stamps] == [1000, 1001, 1002]
    assert len(storage._open) <= most_open


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    storage = LocalFiles(three(tmp_path)[0])
    for file in range(3):
        storage.read_at(file, 0, 1)
    assert len(os.listdir("/proc/self/fd")) == before + 3
    del storage
    assert len(os.listdir("/proc/self/fd")) == before


def test_it_can_be_sent_while_open(tmp_path: Path) -> None:
    paths, contents = three(tmp_path)
    storage = LocalFiles(paths)
    storage.read_at(0, 0, 1)
    arrived = pickle.loads(pickle.dumps(storage))
    assert arrived.read_at(0, 5, 10) == contents[0][5:15]
    assert arrived.stamps == storage.stamps


def test_a_stamp_changes_with_size_or_date(tmp_path: Path) -> None:
    paths, _ = three(tmp_path)
    first = LocalFiles(paths).stamps
    os.utime(paths[1], ns=(1, 1))
    second = LocalFiles(paths).stamps
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, False, True]


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*gone.bin: No such file"):
        LocalFiles([tmp_path / "gone.bin"])
    paths, _ = three(tmp_path)
    storage = LocalFiles(paths)
    paths[0].unlink()
    with pytest.raises(DataError, match=r"cannot read .*0.bin: No such file.*; restore it"):
        storage.read_at(0, 0, 1)


# --- remote: fsspec's file system in memory behaves like an object store ---


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
    return open_remote_tar("memory://bucket/set", "train", cache_folder=tmp_path / "cache", **options)


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
    cached = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert cached <= 2048 + 512


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path, given: ImageSet) -> None:
    (tmp_path / "file").write_text("in the way")
    source = open_remote_tar("memory://bucket/set", "val", cache_folder=tmp_path / "file")
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
        patch.setattr("megabatch.data.shards.index_shards", lambda storage: pytest.fail("headers were read"))
        source = opened(tmp_path)
    np.testing.assert_array_equal(source.read(9), local.read(9))


def test_remote_mistakes(tmp_path: Path, store: Any) -> None:
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
