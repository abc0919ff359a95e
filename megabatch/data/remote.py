"""Tar shards in an object store or on a web server, by `fsspec` address (`s3://...`, `https://...`), through a
bounded local cache.

Files are read in blocks. A block that was fetched is kept on local disk, shared by all workers of the host, until the
cache exceeds its limit; then those unused for longest go. Reading in random order wants a cache as large as the set:
with a smaller one every image costs the fetching of a block, so then choose blocks of about an image's size. An
index beside the shards (`megabatch data pack` leaves one there) saves reading all headers once.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

from megabatch.data.files import FileStamp
from megabatch.data.index import ShardIndex, cached_index, parse_index
from megabatch.data.known import default_cache
from megabatch.data.shards import TarImages, index_shards, split_of_names
from megabatch.data.sources import MEMORY_LIMIT_BYTES, Source, Split, in_memory
from megabatch.errors import ConfigError, DataError

__all__ = ["BlockCache", "RemoteFiles", "is_remote", "open_remote_tar"]

BLOCK_BYTES = 4 * 2**20
CACHE_LIMIT_BYTES = 200 * 10**9
_VERSION_KEYS = ("ETag", "etag", "LastModified", "last_modified", "mtime", "updated", "created", "md5Hash", "ino")


class BlockCache:
    """Blocks of bytes as files under `folder`, together at most `limit_bytes` (and one block more while writing)."""

    def __init__(self, folder: Path, limit_bytes: int = CACHE_LIMIT_BYTES) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self._known_bytes: int | None = None  # None: not counted yet; other processes may add and remove
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "limit_bytes": self.limit_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def get(self, key: str) -> bytes | None:
        """The block, marked as used just now; None when it is not kept."""
        path = self.folder / key
        try:
            content = path.read_bytes()
            os.utime(path)
            return content
        except OSError:
            return None

    def put(self, key: str, content: bytes) -> None:
        """Keep a block; a disk that is full or read-only costs speed, not the run."""
        path = self.folder / key
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
                try:
                    file.write(content)
                    file.close()
                    os.replace(file.name, path)
                except OSError:
                    os.unlink(file.name)
                    raise
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
        self._system: Any = None
        self.stamps = tuple(self._stamp(path) for path in paths)
        self._keys = [
            hashlib.sha256(repr((protocol, p, s, block_bytes)).encode()).hexdigest()[:24]
            for p, s in zip(paths, self.stamps, strict=True)
        ]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_system": None}

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

    @property
    def system(self) -> Any:
        if self._system is None:
            self._system = _file_system(self._protocol)
        return self._system

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


def open_remote_tar(
    address: str,
    split: Split,
    *,
    channels: int = 3,
    num_classes: int | None = None,
    memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
    cache_folder: Path | None = None,
    cache_limit_bytes: int = CACHE_LIMIT_BYTES,
    block_bytes: int = BLOCK_BYTES,
) -> Source:
    """The images of the tar shards in a remote folder.

    Raises:
        ConfigError: no file system for such addresses is installed.
        DataError: nothing there, or shards that are damaged.
    """
    protocol, _, folder = address.partition("://")
    system = _file_system(protocol)
    try:
        found = sorted(str(path) for path in system.ls(folder, detail=False) if str(path).endswith(".tar"))
    except Exception as error:
        raise DataError(
            f"the data path {address} does not exist or cannot be listed: {error}; check the address"
        ) from error
    if not found:
        raise DataError(f"{address} has no *.tar files; give the folder that holds the shards")
    names = split_of_names([path.rpartition("/")[2] for path in found], split, address)
    chosen = [path for path in found if path.rpartition("/")[2] in names]
    cache = BlockCache(cache_folder or default_cache() / "blocks", cache_limit_bytes)
    storage = RemoteFiles(protocol, chosen, cache, block_bytes)
    index = cached_index(storage.stamps, address, split, lambda: _index(storage, folder, split))
    name = f"{folder.rstrip('/').rpartition('/')[2]} {split}"
    return in_memory(TarImages(name, storage, index, channels, num_classes), memory_limit_bytes)


def _index(storage: RemoteFiles, folder: str, split: str) -> ShardIndex:
    """The index that lies beside the shards, if it is of shards of these names and sizes; else one made here."""
    with contextlib.suppress(Exception):
        content = storage.system.cat_file(f"{folder.rstrip('/')}/.megabatch-index.{split}.npz")
        kept = parse_index(io.BytesIO(content))
        if kept is not None and [s[:2] for s in kept.stamps] == [s[:2] for s in storage.stamps]:
            return ShardIndex(storage.stamps, kept.shards, kept.offsets, kept.lengths, kept.labels)
    return index_shards(storage)


def _file_system(protocol: str) -> Any:
    import fsspec

    try:
        return fsspec.filesystem(protocol)
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"no file system for {protocol}:// addresses: {error}; install it or mount the data"
        ) from None
