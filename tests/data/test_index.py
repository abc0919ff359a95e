from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megabatch.data.index import ShardIndex, cached_index, index_beside, read_index, write_index
from megabatch.data.storage import FileStamp
from megabatch.files import default_cache

STAMPS = (FileStamp("a.tar", 2**20, "1"), FileStamp("b.tar", 2**41, "2"))


def an_index(stamps: tuple[FileStamp, ...] = STAMPS) -> ShardIndex:
    return ShardIndex(
        stamps,
        np.array([0, 1, 1], dtype=np.uint32),
        np.array([512, 512, 2**40], dtype=np.int64),
        np.array([7, 8, 9], dtype=np.uint32),
        np.array([5, 0, 999], dtype=np.int64),
    )


def same(one: ShardIndex, other: ShardIndex) -> bool:
    arrays = ("shards", "offsets", "lengths", "labels")
    return one.stamps == other.stamps and all((getattr(one, a) == getattr(other, a)).all() for a in arrays)


def test_an_index_reads_back_equal(tmp_path: Path) -> None:
    write_index(tmp_path / "i.npz", an_index())
    found = read_index(tmp_path / "i.npz", STAMPS)
    assert found is not None
    assert same(found, an_index())
    assert found.labels.dtype == np.int64


@pytest.mark.parametrize(
    "stamps",
    [
        STAMPS[:1],
        (STAMPS[1], STAMPS[0]),
        (STAMPS[0], FileStamp("b.tar", 2**41 + 1, "2")),
        (STAMPS[0], FileStamp("b.tar", 2**41, "3")),
        (STAMPS[0], FileStamp("c.tar", 20, "2")),
    ],
)
def test_an_index_of_other_shards_is_not_taken(tmp_path: Path, stamps: tuple[FileStamp, ...]) -> None:
    write_index(tmp_path / "i.npz", an_index())
    assert read_index(tmp_path / "i.npz", stamps) is None


def test_a_damaged_index_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "i.npz"
    assert read_index(path, STAMPS) is None
    write_index(path, an_index())
    whole = path.read_bytes()
    for cut in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert read_index(path, STAMPS) is None
    for at in range(0, len(whole), 97):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        found = read_index(path, STAMPS)
        assert found is None or same(found, an_index())


def test_it_is_made_once_and_then_cached(tmp_path: Path) -> None:
    made = []

    def make() -> ShardIndex:
        made.append(1)
        return an_index()

    for _ in range(3):
        assert same(cached_index(STAMPS, str(tmp_path), "train", make), an_index())
    assert len(made) == 1
    cached_index(STAMPS, str(tmp_path), "val", make)
    cached_index(STAMPS, str(tmp_path / "other"), "train", make)
    assert len(made) == 3
    changed = (STAMPS[0], FileStamp("b.tar", 2**41, "3"))
    assert cached_index(changed, str(tmp_path), "train", lambda: an_index(changed)).stamps == changed


def test_the_one_beside_the_shards_comes_first(tmp_path: Path) -> None:
    write_index(index_beside(tmp_path, "train"), an_index())
    found = cached_index(STAMPS, str(tmp_path), "train", lambda: pytest.fail("must not be made"))
    assert same(found, an_index())


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MEGABATCH_DATA", str(tmp_path / "file"))
    assert default_cache() == tmp_path / "file"
    assert same(cached_index(STAMPS, str(tmp_path), "train", an_index), an_index())
