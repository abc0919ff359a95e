"""Files are there whole or not at all, also when the writer is killed; a lock lets one in and ends with its process."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megabatch.errors import WriteError
from megabatch.files import (
    UnreadableError,
    append_line,
    flatten,
    link_atomically,
    lock,
    parse_json,
    parse_toml,
    read_bytes,
    read_text,
    write_atomically,
    write_json,
    write_once,
)


def test_a_line_is_added_behind_half_a_line_and_a_full_disk_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    append_line(path, "one")
    with path.open("a") as file:
        file.write("tw")  # its writer was killed
    append_line(path, "three")
    append_line(path, "four")
    assert path.read_text() == "one\ntw\nthree\nfour\n"
    with pytest.raises(WriteError, match="cannot be written: No space left on device; make room") as caught:
        append_line(Path("/dev/full"), "five")
    assert "\n" not in str(caught.value)


def test_text_and_bytes_are_written_and_nothing_stays_beside(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", "caf\u00e9\n")
    write_atomically(tmp_path / "b", b"\x00\xff", durable=False)
    assert (tmp_path / "a").read_bytes() == b"caf\xc3\xa9\n"
    write_atomically(tmp_path / "a", "second")
    assert (tmp_path / "a").read_bytes() == b"second"
    assert (tmp_path / "b").read_bytes() == b"\x00\xff"
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_others_may_read_what_the_umask_lets_them_read(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "a", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    write_atomically(tmp_path / "a", "old")

    def fail(*_: object) -> None:
        assert (tmp_path / "a").read_text() == "old"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(WriteError, match="cannot be written: No space left on device; make room"):
        write_atomically(tmp_path / "a", "new and longer")
    assert (tmp_path / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_the_file_is_on_disk_before_its_name_and_its_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def noted_replace(source: Path, target: Path) -> None:
        done.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    write_atomically(tmp_path / "a", "x")
    assert done == ["file", "rename", "folder"]
    done.clear()
    write_atomically(tmp_path / "a", "x", durable=False)
    assert done == ["rename"]


@pytest.mark.parametrize(("number", "refused"), [(22, False), (5, True)])
def test_a_folder_that_cannot_be_forced_to_disk_is_an_error_only_when_the_disk_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, refused: bool
) -> None:
    def fail_for_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail_for_folders)
    if refused:
        with pytest.raises(WriteError, match="cannot be written"):
            write_atomically(tmp_path / "a", "x")
    else:
        write_atomically(tmp_path / "a", "x")
    assert (tmp_path / "a").read_text() == "x"


def test_a_missing_folder_has_its_own_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(WriteError, match=f"there is no folder '{place}'; make it, or give another") as caught:
            write_atomically(place / "plan.json", "x")
        assert "resume" not in str(caught.value)
    with pytest.raises(WriteError, match="is a folder; give the name of a file"):
        write_atomically(tmp_path, "x")


def test_a_folder_without_permission_has_its_own_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(WriteError, match="cannot be written: Permission denied; give a place that can be") as caught:
        write_atomically(tmp_path / "a", "x")
    assert "\n" not in str(caught.value)


def test_a_killed_writer_leaves_a_whole_file(tmp_path: Path) -> None:
    """The writer writes A's and B's in turn; whenever it is killed, the file holds all A's or all B's."""
    path = tmp_path / "a"
    code = f"""
from pathlib import Path
from megabatch.files import write_atomically
while True:
    for letter in "AB":
        write_atomically(Path({str(path)!r}), letter * 2_000_000, durable=False)
"""
    for wait in (0.0, 0.003, 0.011):
        path.unlink(missing_ok=True)
        with subprocess.Popen([sys.executable, "-c", code]) as writer:
            while not path.exists():
                assert writer.poll() is None
                time.sleep(0.001)
            time.sleep(wait)
            writer.kill()
        content = path.read_bytes()
        assert len(content) == 2_000_000
        assert content in (b"A" * 2_000_000, b"B" * 2_000_000)


def test_two_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    def write(letter: str) -> None:
        for _ in range(50):
            write_atomically(tmp_path / "a", letter * 1000, durable=False)
            assert len((tmp_path / "a").read_bytes()) == 1000

    threads = [threading.Thread(target=write, args=(letter,)) for letter in "AB"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "a").read_text() in ("A" * 1000, "B" * 1000)
    assert os.listdir(tmp_path) == ["a"]


def test_json_is_readable_and_sorted(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"b": 1, "a": [1.5, None]})
    assert (tmp_path / "x.json").read_text() == '{\n  "a": [\n    1.5,\n    null\n  ],\n  "b": 1\n}\n'


def test_nested_tables_become_dotted_names() -> None:
    nested = {"a": {"b": {"c": 1}, "d": [{"e": 2}]}, "f": None, "g": {}}
    assert dict(flatten(nested)) == {"a.b.c": 1, "a.d": [{"e": 2}], "f": None}
    assert dict(flatten(nested, max_depth=1, key=str.upper)) == {"A.B": {"c": 1}, "A.D": [{"e": 2}], "F": None}


def test_what_is_written_once_is_whole_private_and_stays(tmp_path: Path) -> None:
    assert write_once(tmp_path / "a", "first: caf\u00e9")
    assert not write_once(tmp_path / "a", "second")
    assert (tmp_path / "a").read_text(encoding="utf-8") == "first: caf\u00e9"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["a"]
    with pytest.raises(WriteError, match="there is no folder"):
        write_once(tmp_path / "none" / "a", "text")


def test_a_link_is_moved_and_is_never_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    link_atomically(tmp_path / "last", "one")
    replace = os.replace

    def seen(source: Path, target: Path) -> None:
        assert (tmp_path / "last").read_text() == "one"
        replace(source, target)

    monkeypatch.setattr(os, "replace", seen)
    link_atomically(tmp_path / "last", "two")
    assert (tmp_path / "last").read_text() == "two"
    assert sorted(os.listdir(tmp_path)) == ["last", "one", "two"]
    with pytest.raises(WriteError, match="there is no folder"):
        link_atomically(tmp_path / "none" / "last", "one")


def test_a_lock_keeps_others_out_until_it_is_given_back(tmp_path: Path) -> None:
    events: list[str] = []
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with lock(tmp_path / "lock", 0.0) as held:
            assert held
            inside.set()
            assert leave.wait(10)
            events.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(10)
    with lock(tmp_path / "lock", 0.0) as held:
        assert not held
    leave.set()
    with lock(tmp_path / "lock", 10.0) as held:
        assert held
        events.append("second")
    thread.join()
    assert events == ["first", "second"]


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    code = f"""
import time
from pathlib import Path
from megabatch.files import lock
with lock(Path({str(tmp_path / "lock")!r}), 0) as held:
    print(held, flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        with lock(tmp_path / "lock", 0.0) as held:
            assert not held
        holder.kill()
    with lock(tmp_path / "lock", 10.0) as held:
        assert held


def test_a_lock_that_cannot_be_made_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"), lock(tmp_path / "none" / "lock", 0.0):
        pass


def test_what_is_not_an_ordinary_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "device"):
        with pytest.raises(UnreadableError, match="is not an ordinary file") as caught:
            read_text(tmp_path / name)
        assert caught.value.strerror == "is not an ordinary file"
    with pytest.raises(OSError, match="directory"):
        read_text(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "none")


def test_sizes_and_texts_out_of_bounds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"\xff\xfe")
    assert read_bytes(path, 2) == b"\xff\xfe"
    with pytest.raises(UnreadableError, match="is not text"):
        read_text(path)
    os.truncate(path, 2**40)  # takes no room on the disk
    with pytest.raises(UnreadableError, match="is larger than 16 MiB"):
        read_text(path)


@pytest.mark.parametrize("value", ["[" * 5000 + "]" * 5000, "[" * 65 + "]" * 65, "1" + "0" * 29, "9" * 5000])
def test_depths_and_numbers_out_of_bounds_are_refused(value: str) -> None:
    for parse, text in ((parse_toml, f"a = {value}"), (parse_json, f'{{"a": {value}}}')):
        with pytest.raises(ValueError, match=r"nested more than 64 deep|more than 64 bits|digits"):
            parse(text)


def test_what_is_within_bounds_is_parsed() -> None:
    deep, number = "[" * 60 + "]" * 60, str(2**63 - 1)
    assert (
        parse_toml(f"a = {number}\nb = {deep}")["a"] == parse_json(f'{{"a": {number}, "b": {deep}}}')["a"] == 2**63 - 1
    )
