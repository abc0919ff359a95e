"""Atomic writes, locks, and reading what may be damaged or hostile. And `flatten` for tables.

A file is written beside its place, forced to disk and renamed. A reader sees the old file or the new one, never a part;
after a power failure the new name is there too, because the folder is forced to disk as well.
A lock belongs to the process that holds it, so it ends with that process however that ends.

Every file that a user gives is opened here: a pipe or a device in its place would block for ever, a file of many
gigabytes would fill the memory. Every text in it is parsed here: nesting that overflows the stack and numbers that no
machine word holds are refused before anything else sees them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import secrets
import stat
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megabatch.errors import WriteError

_POLL_SECONDS = 0.05
# What a file system answers that cannot force a folder to disk, and a folder that may be written but not listed.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)
_MAX_TEXT_BYTES = 16 * 2**20
_MAX_DEPTH = 64
_CHUNK_BYTES = 2**20


class UnreadableError(OSError):
    """A file that is there but cannot be used; the message says why, without its content."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.strerror = reason


def default_cache() -> Path:
    """$MEGABATCH_DATA, else $XDG_CACHE_HOME/megabatch, else ~/.cache/megabatch: for sets, indexes, helpers."""
    if chosen := os.environ.get("MEGABATCH_DATA"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "megabatch"


@contextlib.contextmanager
def open_regular(path: Path, buffer_bytes: int = _CHUNK_BYTES) -> Iterator[io.BufferedReader[Any]]:
    """Open an ordinary file to read; UnreadableError for a pipe or a device, FileNotFoundError, OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with io.BufferedReader(io.FileIO(descriptor), buffer_bytes) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UnreadableError("is not an ordinary file")
        yield file


def read_bytes(path: Path, limit_bytes: int) -> bytes:
    """The content of an ordinary file; UnreadableError for one that is larger than the limit, and as `open_regular`."""
    with open_regular(path, 8192) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes > limit_bytes:
            raise UnreadableError(f"is larger than {limit_bytes // 2**20:,} MiB")
        return file.read(num_bytes)


def read_text(path: Path) -> str:
    """The text of an ordinary file; raises as `read_bytes` does, UnreadableError also for what is not UTF-8."""
    try:
        return read_bytes(path, _MAX_TEXT_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableError(f"is not text (byte {error.start} is not UTF-8)") from None


def parse_toml(text: str) -> dict[str, Any]:
    """The table in a text; ValueError for what is not TOML, too deep, or holds a number of more than 64 bits."""
    return dict(_parsed(tomllib.loads, text))


def parse_json(text: str | bytes) -> Any:
    """The value in a text; ValueError for what is not JSON, too deep, or holds a number of more than 64 bits."""
    return _parsed(json.loads, text)


def _parsed(parse: Callable[[Any], Any], text: str | bytes) -> Any:
    try:
        found = parse(text)
    except RecursionError:
        raise ValueError(f"tables or lists are nested more than {_MAX_DEPTH} deep") from None
    level = [found]
    for _ in range(_MAX_DEPTH):
        if any(isinstance(one, int) and not -(2**63) <= one < 2**64 for one in level):
            raise ValueError("a whole number has more than 64 bits")
        inner = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = [value for values in inner for value in values]
        if not level:
            return found
    raise ValueError(f"tables or lists are nested more than {_MAX_DEPTH} deep")


def write_atomically(path: Path, content: bytes | str, *, durable: bool = True) -> None:
    """Write beside `path`, force it to disk, then rename: readers see the old file or the new one, never a part.

    durable: False leaves out forcing it to disk, for a cache that can be filled again after a power failure.

    Raises:
        WriteError: there is no such folder, the path is one, or the disk does not take the file.
    """
    if path.is_dir():
        raise WriteError(f"'{path}' is a folder; give the name of a file in it")
    data = content.encode() if isinstance(content, str) else content
    with _beside(path) as part:
        with open(part, "xb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
        if durable:
            _sync_folder(path.parent)


def write_once(path: Path, text: str) -> bool:
    """Write a file for its owner alone, whole; False when one is there, which stays.

    Raises:
        WriteError: there is no such folder, or the disk does not take the file.
    """
    with _beside(path) as part:
        with open(part, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(text)
        try:
            os.link(part, path)
        except FileExistsError:
            return False
    return True


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a table as readable JSON with sorted keys, atomically."""
    write_atomically(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def append_line(path: Path, text: str) -> None:
    """Add a line at the end; half a line that a killed writer or a full disk has left there is ended first.

    Raises:
        WriteError: the disk does not take the line.
    """
    try:
        with open(path, "a+b") as file:
            num_bytes = file.seek(0, os.SEEK_END)
            is_torn = num_bytes > 0 and os.pread(file.fileno(), 1, num_bytes - 1) != b"\n"
            file.write(b"\n" * is_torn + text.encode() + b"\n")
    except OSError as error:
        raise WriteError(f"'{path}' cannot be written: {error.strerror}; make room there and try again") from None


def flatten(
    table: Mapping[str, Any], *, max_depth: int = 32, key: Callable[[str], str] = str
) -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values of nested tables; tables deeper than `max_depth` are values, `key` cleans names."""
    for name, value in table.items():
        if isinstance(value, dict) and max_depth > 0:
            for inner, leaf in flatten(value, max_depth=max_depth - 1, key=key):
                yield f"{key(name)}.{inner}", leaf
        else:
            yield key(name), value


def link_atomically(path: Path, target: str) -> None:
    """Point the symbolic link `path` at `target`; readers see the old target or the new one.

    Raises:
        WriteError: the disk does not take the link.
    """
    with _beside(path) as part:
        part.symlink_to(target)
        os.replace(part, path)
        _sync_folder(path.parent)


@contextlib.contextmanager
def lock(path: Path, seconds: float) -> Iterator[bool]:
    """Hold the lock file while the block runs; True when it is held, False when `seconds` of waiting were in vain.

    The folder of the file must exist. The file stays: removing it would let two processes hold "the same" lock.

    Raises:
        OSError: the file cannot be made, or its file system has no locks.
    """
    deadline = time.monotonic() + seconds
    with open(path, "ab") as file:
        held = _try_lock(file.fileno())
        while not held and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            held = _try_lock(file.fileno())
        yield held


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A name beside `path` that nobody else uses, also on another host; what is left there is removed."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        yield part
    except (FileNotFoundError, NotADirectoryError):
        raise WriteError(
            f"'{path}' cannot be written: there is no folder '{path.parent}'; make it, or give another place"
        ) from None
    except PermissionError as error:
        raise WriteError(f"'{path}' cannot be written: {error.strerror}; give a place that can be") from None
    except OSError as error:
        raise WriteError(
            f"'{path}' cannot be written: {error.strerror}; make room there and try again (a run goes on with --resume)"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Force the names in the folder to disk."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
