"""Byte ranges of local files read by many threads, files that appear whole or not at all, and a lock for a host.

Reading takes no lock and moves no shared position (`pread`), so threads do not wait for each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from megabatch.errors import DataError

__all__ = ["FileStamp", "LocalFiles", "Storage", "host_lock", "write_whole"]

MAX_OPEN_FILES = 512
LOCK_SECONDS = 600.0


class FileStamp(NamedTuple):
    """What tells one version of a file from another without reading it."""

    name: str
    num_bytes: int
    changed: str  # date of change in nanoseconds, or what a remote store has instead


class Storage(Protocol):
    """A list of files known by their numbers; may be read from several threads and sent to another process."""

    stamps: tuple[FileStamp, ...]

    def read_at(self, file: int, offset: int, num_bytes: int) -> bytes:
        """That range of bytes, shorter only at the end of the file; DataError when it cannot be read."""

    def place(self, file: int) -> str:
        """Where the file is, for people."""


class LocalFiles:
    """Files on this machine or mounted on it.

    Descriptors stay open, at most MAX_OPEN_FILES of them: with more files the rest is opened for each read. None is
    ever closed while the object lives, so no thread can read from a number that meanwhile means another file.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._paths = [str(path) for path in paths]
        self._open: dict[int, int] = {}
        self._lock = threading.Lock()
        stamps = []
        for path in paths:
            try:
                found = path.stat()
            except OSError as error:
                raise DataError(f"cannot read {path}: {error.strerror}; restore it") from error
            stamps.append(FileStamp(path.name, found.st_size, str(found.st_mtime_ns)))
        self.stamps = tuple(stamps)

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self._paths, "stamps": self.stamps}  # a descriptor means nothing in another process

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._paths, self.stamps = state["paths"], state["stamps"]
        self._open, self._lock = {}, threading.Lock()

    def __del__(self) -> None:
        for descriptor in self.__dict__.get("_open", {}).values():
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def place(self, file: int) -> str:
        return self._paths[file]

    def read_at(self, file: int, offset: int, num_bytes: int) -> bytes:
        try:
            descriptor = self._open.get(file)
            if descriptor is not None:
                return _pread(descriptor, offset, num_bytes)
            descriptor = os.open(self._paths[file], os.O_RDONLY | os.O_CLOEXEC)
            kept = self._keep(file, descriptor)
            try:
                return _pread(descriptor, offset, num_bytes)
            finally:
                if not kept:
                    os.close(descriptor)
        except OSError as error:
            raise DataError(f"cannot read {self._paths[file]}: {error.strerror}; restore it") from error

    def _keep(self, file: int, descriptor: int) -> bool:
        with self._lock:
            if file in self._open or len(self._open) >= MAX_OPEN_FILES:
                return False
            self._open[file] = descriptor
            return True


def write_whole(path: Path, content: bytes) -> None:
    """Writes beside `path` and renames: readers see the old file or the new one, never a part."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        with open(beside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}; make room there or make it writable") from error
    finally:
        beside.unlink(missing_ok=True)


@contextlib.contextmanager
def host_lock(path: Path, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Holds the lock file while the block runs, so that the workers of a host do a piece of work once.

    Gives up waiting after `seconds` and goes on without the lock: what it guards is written whole by whoever writes
    it, the lock only saves doing it twice.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        give_up = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > give_up:
                    break
                time.sleep(0.05)
        yield


def _pread(descriptor: int, offset: int, num_bytes: int) -> bytes:
    """As many bytes as there are up to `num_bytes`; one call may return fewer."""
    content = os.pread(descriptor, num_bytes, offset)
    while len(content) < num_bytes:
        more = os.pread(descriptor, num_bytes - len(content), offset + len(content))
        if not more:
            break
        content += more
    return content
