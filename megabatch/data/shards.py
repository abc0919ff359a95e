"""Images in WebDataset tar shards: `000123.jpg` beside `000123.cls` (or `.json`), random access by index.

Members that share a name up to the first dot of its last part are one sample: an image (jpg, jpeg, png or webp) and
its label, a `.cls` file that holds an integer or a `.json` file with `label` or `cls`. Other members (`.txt`, ...)
are passed over. A shard belongs to a split by a word of its name (`imagenet-train-000123.tar`); see `split_of_names`.
Images are read from where they lie in the shard: no member ever becomes a file, so no member's name can point
anywhere.

Shards may lie in an object store or on a web server. Reading in random order wants a cache as large as the set: with a
smaller one every image costs the fetching of a block, so then choose blocks of about an image's size. An index beside
the shards (`megabatch data pack` leaves one there) saves reading all headers once.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import numpy as np

from megabatch.data.index import ShardIndex, cached_index, index_name, parse_index
from megabatch.data.sources import (
    MEMORY_LIMIT_BYTES,
    EncodedImages,
    MissingSplitError,
    Source,
    Split,
    checked_labels,
    existing_folder,
    in_memory,
)
from megabatch.data.storage import BLOCK_BYTES as REMOTE_BLOCK_BYTES
from megabatch.data.storage import (
    CACHE_LIMIT_BYTES,
    BlockCache,
    LocalFiles,
    RemoteFiles,
    Storage,
    default_cache,
    file_system,
)
from megabatch.data.tar import BLOCK_BYTES, Member, list_members
from megabatch.errors import DataError

__all__ = ["IMAGE_SUFFIXES", "TarImages", "index_shards", "open_remote_tar", "open_tar", "split_of_names", "tar_files"]

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
LABEL_SUFFIXES = ("cls", "json")
LARGEST_LABEL_BYTES = 2**20
SPLIT_WORDS = {"train": ("train", "training"), "val": ("validation", "valid", "val", "test")}


class TarImages(EncodedImages):
    """The samples of tar shards, in the order of the shards' names and of their members."""

    def __init__(self, name: str, storage: Storage, index: ShardIndex, channels: int, num_classes: int | None) -> None:
        self.name = name
        self.channels = channels
        self.labels, self.num_classes = checked_labels(name, index.labels, len(index.offsets), num_classes)
        self._storage, self._index = storage, index

    def __len__(self) -> int:
        return len(self.labels)

    def read_bytes(self, index: int) -> bytes:
        where = self._index
        return self._storage.read_at(int(where.shards[index]), int(where.offsets[index]), int(where.lengths[index]))

    def name_of(self, index: int) -> str:
        shard, offset = int(self._index.shards[index]), int(self._index.offsets[index])
        header = self._storage.read_at(shard, offset - BLOCK_BYTES, 100)
        member = header.partition(b"\0")[0].decode("utf-8", "replace")
        return f"{member} in {self._storage.place(shard)}"


def open_tar(
    path: Path,
    split: Split,
    *,
    channels: int = 3,
    num_classes: int | None = None,
    memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
) -> Source:
    """The images of a folder of tar shards, or of one shard; in memory when small and of one size."""
    storage = LocalFiles(tar_files(path, split))
    index = cached_index(storage.stamps, str(path.resolve()), split, lambda: index_shards(storage))
    return in_memory(TarImages(f"{path.stem} {split}", storage, index, channels, num_classes), memory_limit_bytes)


def open_remote_tar(
    address: str,
    split: Split,
    *,
    channels: int = 3,
    num_classes: int | None = None,
    memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
    cache_folder: Path | None = None,
    cache_limit_bytes: int = CACHE_LIMIT_BYTES,
    block_bytes: int = REMOTE_BLOCK_BYTES,
) -> Source:
    """The images of the tar shards in a remote folder.

    Raises:
        ConfigError: no file system for such addresses is installed.
        DataError: nothing there, or shards that are damaged.
    """
    protocol, _, folder = address.partition("://")
    system = file_system(protocol)
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
    index = cached_index(storage.stamps, address, split, lambda: _remote_index(storage, folder, split))
    name = f"{folder.rstrip('/').rpartition('/')[2]} {split}"
    return in_memory(TarImages(name, storage, index, channels, num_classes), memory_limit_bytes)


def tar_files(path: Path, split: Split) -> list[Path]:
    """The shards of a split in a folder, sorted by name; or the one shard that was given."""
    files = [path] if path.is_file() else sorted(existing_folder(path).glob("*.tar"))
    if not files:
        raise DataError(f"{path} has no *.tar files; give the folder that holds the shards")
    names = split_of_names([file.name for file in files], split, str(path))
    return [file for file in files if file.name in names]


def split_of_names(names: Sequence[str], split: Split, place: str) -> set[str]:
    """The shards of a split: those whose name has one of its words.

    `train` or `training`; for val `validation`, `valid` or `val`, else `test`. When no name has any of these words
    the set has no splits and serves whichever is asked for.
    """
    words = {name: set(re.split(r"[^a-z]+", name.lower())) for name in names}
    for word in SPLIT_WORDS[split]:
        if found := {name for name in names if word in words[name]}:
            return found
    if any(words[name] & {w for known in SPLIT_WORDS.values() for w in known} for name in names):
        wanted = " or ".join(SPLIT_WORDS[split])
        found_names = ", ".join(names[:5])
        raise MissingSplitError(f"{place} has no shard with {wanted} in its name (found: {found_names}); rename them")
    return set(names)


def index_shards(storage: Storage, threads: int = 4) -> ShardIndex:
    """Reads the headers and the labels of all shards.

    Raises:
        DataError: a damaged shard, an image without a label, a label without an image, a label that is no integer.
    """
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(lambda file: _samples(storage, file), range(len(storage.stamps))))
    counts = [len(samples) for samples in found]
    table = np.array([row for samples in found for row in samples], dtype=np.int64).reshape(-1, 3)
    return ShardIndex(
        stamps=storage.stamps,
        shards=np.repeat(np.arange(len(found), dtype=np.uint32), counts),
        offsets=table[:, 0].copy(),
        lengths=table[:, 1].astype(np.uint32),
        labels=table[:, 2].copy(),
    )


def _remote_index(storage: RemoteFiles, folder: str, split: str) -> ShardIndex:
    """The index that lies beside the shards, if it is of shards of these names and sizes; else one made here."""
    with contextlib.suppress(Exception):
        content = storage.system.cat_file(f"{folder.rstrip('/')}/{index_name(split)}")
        beside = parse_index(io.BytesIO(content))
        if beside is not None and [s[:2] for s in beside.stamps] == [s[:2] for s in storage.stamps]:
            return ShardIndex(storage.stamps, beside.shards, beside.offsets, beside.lengths, beside.labels)
    return index_shards(storage)


def _samples(storage: Storage, file: int) -> list[tuple[int, int, int]]:
    """(offset, length, label) of each sample of a shard."""
    rows = []
    for key, members in _by_sample(list_members(storage, file)):
        where = f"{storage.place(file)}, sample '{key}'"
        images = [member for suffix, member in members if suffix in IMAGE_SUFFIXES]
        labels = [(suffix, member) for suffix, member in members if suffix in LABEL_SUFFIXES]
        if not images and not labels:
            continue
        if len(images) != 1:
            raise DataError(f"{where} has {len(images)} images, one is needed; pack the shard again")
        if not labels:
            raise DataError(f"{where} has no .cls or .json member for its label; pack the shard again")
        suffix, member = labels[0]
        content = storage.read_at(file, member.offset, min(member.num_bytes, LARGEST_LABEL_BYTES))
        rows.append((images[0].offset, images[0].num_bytes, _label(content, suffix, where)))
    return rows


def _by_sample(members: Iterable[Member]) -> Iterable[tuple[str, list[tuple[str, Member]]]]:
    """Runs of members with the same key, each with its lower-case suffix; hidden members are passed over."""
    key, run = "", list[tuple[str, Member]]()
    for member in members:
        path = PurePosixPath(member.name)
        stem, _, suffix = path.name.partition(".")
        if not stem:
            continue
        of_member = str(path.with_name(stem))
        if run and of_member != key:
            yield key, run
            run = []
        key = of_member
        run.append((suffix.lower(), member))
    if run:
        yield key, run


def _label(content: bytes, suffix: str, where: str) -> int:
    """The integer in a `.cls` file, or under `label` or `cls` in a `.json` file."""
    shown = content[:40].decode("utf-8", "replace").strip()
    try:
        if suffix == "cls":
            return int(content.decode("ascii").strip())
        table = json.loads(content)
        value = table["label"] if "label" in table else table["cls"]
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError
        return value
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError(f"{where} has the label '{shown}' in .{suffix}; an integer from 0 is needed") from None
