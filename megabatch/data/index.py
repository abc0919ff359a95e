"""Where each image of a set of shards lies, found once and cached.

`megabatch data pack` leaves the index beside the shards as `.megabatch-index.<split>.npz`; otherwise it is cached in
the user's cache folder. An index names each shard with its size and its date of change (remote: what the store has
instead); when one of them differs, or the index cannot be read, it is made anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megabatch.data.randomness import Ints
from megabatch.data.storage import FileStamp
from megabatch.errors import WriteError
from megabatch.files import default_cache, lock, open_regular, parse_json, write_atomically

FORMAT = 1
LOCK_SECONDS = 600.0


@dataclass(frozen=True)
class ShardIndex:
    """For each image: its shard, where its bytes begin there, how many they are, and its label."""

    stamps: tuple[FileStamp, ...]
    shards: NDArray[np.uint32]
    offsets: Ints
    lengths: NDArray[np.uint32]
    labels: Ints


def cached_index(stamps: tuple[FileStamp, ...], place: str, split: str, make: Callable[[], ShardIndex]) -> ShardIndex:
    """The index of the shards with these stamps: from beside them, from the cache, or made and cached.

    `place` is the folder or address of the set. Of several ranks on a host one makes the index, the others wait.
    """
    digest = hashlib.sha256(json.dumps([place, split, [stamp.name for stamp in stamps]]).encode()).hexdigest()[:24]
    path = default_cache() / "index" / f"{digest}.npz"
    for candidate in (index_beside(Path(place), split), path):
        if (index := read_index(candidate, stamps)) is not None:
            return index
    # A cache folder that cannot be written costs time at the next start, no more. Nor does a lock that cannot be had:
    # the index is written atomically, the lock only saves making it twice.
    with contextlib.suppress(OSError, WriteError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with lock(path.with_suffix(".lock"), LOCK_SECONDS):
            index = read_index(path, stamps)
            if index is None:
                index = make()
                write_index(path, index)
    return make() if index is None else index


def index_name(split: str) -> str:
    return f".megabatch-index.{split}.npz"


def index_beside(folder: Path, split: str) -> Path:
    """Where the index of a split lies when it is beside the shards."""
    return (folder if folder.is_dir() else folder.parent) / index_name(split)


def write_index(path: Path, index: ShardIndex) -> None:
    head = json.dumps({"format": FORMAT, "stamps": index.stamps})
    out = io.BytesIO()
    np.savez(
        out,
        head=np.frombuffer(head.encode(), dtype=np.uint8),
        shards=index.shards,
        offsets=index.offsets,
        lengths=index.lengths,
        labels=index.labels if index.labels.max(initial=0) >= 2**31 else index.labels.astype(np.int32),
    )
    write_atomically(path, out.getvalue())


def read_index(path: Path, stamps: tuple[FileStamp, ...]) -> ShardIndex | None:
    """The index in a file; None when there is none, when it is damaged, or when it is of other shards."""
    try:
        with open_regular(path) as file:
            index = parse_index(file)
    except OSError:
        return None
    return index if index is not None and index.stamps == stamps else None


def parse_index(file: BinaryIO | io.BytesIO) -> ShardIndex | None:
    """What `write_index` wrote; None when it is damaged or of another format."""
    try:
        found = read_arrays(file)
        head = parse_json(found["head"].tobytes())
        if head["format"] != FORMAT:
            return None
        stamps = tuple(FileStamp(*stamp) for stamp in head["stamps"])
        shards, offsets, lengths, labels = (found[name] for name in ("shards", "offsets", "lengths", "labels"))
        ends = offsets.astype(np.int64) + lengths
        sizes = np.array([stamp.num_bytes for stamp in stamps], dtype=np.int64)
        if not (shards.shape == ends.shape == labels.shape == (len(labels),)) or (
            (offsets < 0).any() or (shards >= len(stamps)).any() or (ends > sizes[shards]).any()
        ):
            return None  # an image beyond the end of its shard
        return ShardIndex(stamps, shards, offsets, lengths, labels.astype(np.int64))
    except (ValueError, KeyError, TypeError):
        return None


def read_arrays(file: BinaryIO | io.BytesIO) -> dict[str, NDArray[Any]]:
    """The arrays of an npz file; ValueError for whatever is wrong with it."""
    try:
        with np.load(file, allow_pickle=False) as found:
            return {name: found[name] for name in found.files}
    except Exception as error:  # zip, zlib, struct and numpy's own parser have no error in common
        raise ValueError(f"{type(error).__name__}: {error}") from None
