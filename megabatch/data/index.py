"""Where each image of a set of shards lies, found once and kept.

Kept beside the shards as `.megabatch-index.<split>.npz` by `megabatch data pack` and `verify`, otherwise in the
user's cache folder. An index names each shard with its size and its date of change (remote: what the store has
instead); when one of them differs, or the index cannot be read, it is made anew.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from megabatch.data.files import FileStamp, host_lock, write_whole
from megabatch.data.known import default_cache
from megabatch.errors import DataError

__all__ = ["ShardIndex", "cached_index", "index_beside", "parse_index", "read_index", "write_index"]

FORMAT = 1


@dataclass(frozen=True)
class ShardIndex:
    """For each image: its shard, where its bytes begin there, how many they are, and its label."""

    stamps: tuple[FileStamp, ...]
    shards: NDArray[np.uint32]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.uint32]
    labels: NDArray[np.int64]


def cached_index(stamps: tuple[FileStamp, ...], place: str, split: str, make: Callable[[], ShardIndex]) -> ShardIndex:
    """The index of the shards with these stamps: kept beside them, kept in the cache, or made and kept there.

    `place` is the folder or address of the set. Of several workers on a host one makes the index, the others wait.
    """
    if (kept := read_index(index_beside(Path(place), split), stamps)) is not None:
        return kept
    digest = hashlib.sha256(json.dumps([place, split, [stamp.name for stamp in stamps]]).encode()).hexdigest()[:24]
    path = default_cache() / "index" / f"{digest}.npz"
    if (kept := read_index(path, stamps)) is not None:
        return kept
    try:
        with host_lock(path.with_suffix(".lock")):
            if (kept := read_index(path, stamps)) is None:
                kept = make()
                write_index(path, kept)
            return kept
    except OSError:  # a cache folder that cannot be written costs time at the next start, no more
        return make()


def index_beside(folder: Path, split: str) -> Path:
    """Where the index of a split lies when it is kept with the shards."""
    return (folder if folder.is_dir() else folder.parent) / f".megabatch-index.{split}.npz"


def write_index(path: Path, index: ShardIndex) -> None:
    head = json.dumps({"format": FORMAT, "stamps": index.stamps})
    out = io.BytesIO()
    np.savez(
        out,
        head=np.frombuffer(head.encode(), dtype=np.uint8),
        shards=index.shards,
        offsets=index.offsets,
        lengths=index.lengths,
        labels=index.labels.astype(np.int32),
    )
    write_whole(path, out.getvalue())


def read_index(path: Path, stamps: tuple[FileStamp, ...]) -> ShardIndex | None:
    """A kept index; None when there is none, when it is damaged, or when it is of other shards."""
    try:
        with open(path, "rb") as file:
            kept = parse_index(file)
    except OSError:
        return None
    return kept if kept is not None and kept.stamps == stamps else None


def parse_index(file: BinaryIO | io.BytesIO) -> ShardIndex | None:
    """What `write_index` wrote; None when it is damaged or of another format."""
    try:
        with np.load(file, allow_pickle=False) as kept:
            head = json.loads(kept["head"].tobytes())
            if head["format"] != FORMAT:
                return None
            known = tuple(FileStamp(*stamp) for stamp in head["stamps"])
            return ShardIndex(known, kept["shards"], kept["offsets"], kept["lengths"], kept["labels"].astype(np.int64))
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, DataError):
        return None
