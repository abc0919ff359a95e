from __future__ import annotations

import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megabatch.data import files
from megabatch.data.files import LocalFiles, host_lock, write_whole
from megabatch.errors import DataError


def three(folder: Path) -> tuple[list[Path], list[bytes]]:
    contents = [os.urandom(1000 + i) for i in range(3)]
    paths = [folder / f"{i}.bin" for i in range(3)]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths, contents


@pytest.mark.parametrize("most_open", [0, 1, 512])
def test_ranges_from_many_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_open: int) -> None:
    monkeypatch.setattr(files, "MAX_OPEN_FILES", most_open)
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


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_whole(path, b"one")
    write_whole(path, b"two")
    assert path.read_bytes() == b"two"
    with pytest.raises(DataError, match=r"cannot write .*nowhere"):
        write_whole(tmp_path / "nowhere" / "x", b"")
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_the_lock_keeps_others_out_until_it_is_given_back(tmp_path: Path) -> None:
    events: list[str] = []
    inside = threading.Event()

    def first() -> None:
        with host_lock(tmp_path / "lock"):
            inside.set()
            time.sleep(0.3)
            events.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(10)
    with host_lock(tmp_path / "lock"):
        events.append("second")
    thread.join()
    assert events == ["first", "second"]


def test_waiting_for_the_lock_ends(tmp_path: Path) -> None:
    with host_lock(tmp_path / "lock"), host_lock(tmp_path / "lock", seconds=0.1):
        pass
