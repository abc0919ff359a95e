"""Where bytes lie: files on this machine, files in an object store or on a web server, and the user's cache folder.

Local files are read by many threads: reading takes no lock and moves no shared position (`pread`), so threads do not
wait for each other. Remote files are read by `fsspec` address (`s3://...`, `https://...`) in blocks. A block that was
fetched is cached on local disk for all ranks of the host until the cache exceeds its limit; then the blocks that were
unused for longest go.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from megabatch.errors import ConfigError, DataError, WriteError
from megabatch.files import write_atomically

MAX_OPEN_FILES = 512
BLOCK_BYTES = 4 * 2**20
CACHE_LIMIT_BYTES = 200 * 10**9
_VERSION_KEYS = ("ETag", "etag", "LastModified", "last_modified", "mtime", "updated", "created", "md5Hash", "ino")


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
            if not stat.S_ISREG(found.st_mode):  # reading a pipe would block for ever
                raise DataError(f"cannot read {path}: it is not an ordinary file; restore it")
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
            with self._lock:
                stays_open = file not in self._open and len(self._open) < MAX_OPEN_FILES
                if stays_open:
                    self._open[file] = descriptor
            try:
                return _pread(descriptor, offset, num_bytes)
            finally:
                if not stays_open:
                    os.close(descriptor)
        except OSError as error:
            raise DataError(f"cannot read {self._paths[file]}: {error.strerror}; restore it") from error


class BlockCache:
    """Blocks of bytes as files under `folder`, together at most `limit_bytes` (and one block more while writing)."""

    def __init__(self, folder: Path, limit_bytes: int = CACHE_LIMIT_BYTES) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self._known_bytes: int | None = None  # None: not counted yet; other processes may add and remove
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockCache, (self.folder, self.limit_bytes)

    def get(self, key: str) -> bytes | None:
        """The block, marked as used just now; None when it is not cached."""
        path = self.folder / key
        try:
            content = path.read_bytes()
            os.utime(path)
            return content
        except OSError:
            return None

    def put(self, key: str, content: bytes) -> None:
        """Cache a block; a disk that is full or read-only costs speed, not the run."""
        path = self.folder / key
        with contextlib.suppress(OSError, WriteError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content, durable=False)
            with self._lock:
                if self._known_bytes is None:
                    self._known_bytes = sum(size for _, size, _ in self._entries())
                else:
                    self._known_bytes += len(content)
                if self._known_bytes > self.limit_bytes:
                    self._known_bytes = self._make_room()

    def _make_room(self) -> int:
        """Remove what was unused for longest until a tenth of the room is free; returns what is left."""
        entries = sorted(self._entries())
        total = sum(size for _, size, _ in entries)
        for _, size, path in entries:
            if total <= 0.9 * self.limit_bytes:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size
        return total

    def _entries(self) -> list[tuple[int, int, str]]:
        """(last use, size, path) of every block."""
        found = []
        for folder, _, names in os.walk(self.folder):
            for name in names:
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError):
                    status = os.stat(path)
                    found.append((status.st_mtime_ns, status.st_size, path))
        return found


class RemoteFiles:
    """Files of an `fsspec` file system, read in blocks through the cache."""

    def __init__(self, protocol: str, paths: list[str], cache: BlockCache, block_bytes: int = BLOCK_BYTES) -> None:
        self._protocol, self._paths, self._cache, self._block_bytes = protocol, paths, cache, block_bytes
        self.stamps = tuple(self._stamp(path) for path in paths)
        self._keys = [
            hashlib.sha256(repr((protocol, p, s, block_bytes)).encode()).hexdigest()[:24]
            for p, s in zip(paths, self.stamps, strict=True)
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "system"}

    @cached_property
    def system(self) -> Any:
        return file_system(self._protocol)

    def place(self, file: int) -> str:
        return f"{self._protocol}://{self._paths[file]}"

    def read_at(self, file: int, offset: int, num_bytes: int) -> bytes:
        end = min(offset + num_bytes, self.stamps[file].num_bytes)
        parts = []
        for block in range(offset // self._block_bytes, -(-end // self._block_bytes)):
            start = block * self._block_bytes
            content = self._block(file, block)
            parts.append(content[max(0, offset - start) : end - start])
        return b"".join(parts)

    def _block(self, file: int, block: int) -> bytes:
        key = f"{self._keys[file]}/{block}"
        start = block * self._block_bytes
        end = min(start + self._block_bytes, self.stamps[file].num_bytes)
        content = self._cache.get(key)
        if content is not None and len(content) == end - start:
            return content
        try:
            content = bytes(self.system.cat_file(self._paths[file], start=start, end=end))
        except Exception as error:  # each store has its own errors
            raise DataError(
                f"cannot read {self.place(file)}: {type(error).__name__}: {error}; check the connection"
            ) from error
        if len(content) != end - start:
            raise DataError(
                f"{self.place(file)} gave {len(content)} bytes of {end - start}; it changed while it was read"
            )
        self._cache.put(key, content)
        return content

    def _stamp(self, path: str) -> FileStamp:
        try:
            about = self.system.info(path)
        except Exception as error:
            raise DataError(f"cannot look at {self._protocol}://{path}: {type(error).__name__}: {error}") from error
        if about.get("size") is None:
            raise DataError(f"{self._protocol}://{path} does not say its size; use a store that does")
        version = next((str(about[key]) for key in _VERSION_KEYS if about.get(key)), "")
        return FileStamp(path.rpartition("/")[2], int(about["size"]), version)


def is_remote(path: str) -> bool:
    return "://" in path


def file_system(protocol: str) -> Any:
    """The `fsspec` file system for addresses of a protocol; ConfigError when it is not installed."""
    import fsspec

    try:
        return fsspec.filesystem(protocol)
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"no file system for {protocol}:// addresses: {error}; install it or mount the data"
        ) from None


def _pread(descriptor: int, offset: int, num_bytes: int) -> bytes:
    """As many bytes as there are up to `num_bytes`; one call may return fewer."""
    content = os.pread(descriptor, num_bytes, offset)
    while len(content) < num_bytes:
        more = os.pread(descriptor, num_bytes - len(content), offset + len(content))
        if not more:
            break
        content += more
    return content
