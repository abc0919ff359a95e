"""Images in WebDataset tar shards: `000123.jpg` beside `000123.cls` (or `.json`), random access by index.

Members that share a name up to the first dot of its last part are one sample: an image (jpg, jpeg, png or webp) and
its label, a `.cls` file that holds an integer or a `.json` file with `label` or `cls`. Other members (`.txt`, ...)
are passed over. A shard belongs to a split by a word of its name (`imagenet-train-000123.tar`); see `split_of_names`.
Images are read from where they lie in the shard: no member ever becomes a file, so no member's name can point
anywhere.

Members are found by reading headers only: those of POSIX.1-1988 (ustar), the pax records of POSIX.1-2001 as far as they
speak of name and size, and long names as GNU tar writes them. Python's `tarfile` knows more and is much slower, which
counts for the millions of members of ImageNet. A shard must end with a block of zeros, as the format asks: without that
mark a file cut between two members could not be told from a whole one.

Shards may lie in an object store or on a web server. Reading in random order wants a cache as large as the set: with a
smaller one every image costs the fetching of a block, so then choose blocks of about an image's size. An index beside
the shards (`megabatch data pack` leaves one there) saves reading all headers once.
"""

from __future__ import annotations

import contextlib
import io
import re
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from megabatch.data.index import ShardIndex, cached_index, index_name, parse_index
from megabatch.data.sources import EncodedImages, MissingSplitError, Split, checked_labels, files_of_set
from megabatch.data.storage import BLOCK_BYTES as REMOTE_BLOCK_BYTES
from megabatch.data.storage import CACHE_LIMIT_BYTES, BlockCache, LocalFiles, RemoteFiles, Storage, file_system
from megabatch.errors import DataError
from megabatch.files import default_cache, parse_json

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
LABEL_SUFFIXES = ("cls", "json")
LARGEST_LABEL_BYTES = 2**20
SPLIT_WORDS = {"train": ("train", "training"), "val": ("validation", "valid", "val", "test")}
BLOCK_BYTES = 512
WINDOW_BYTES = 64 * 1024  # headers of small neighbours come with one read

_REGULAR, _FOLDER = (b"0", b"\0", b"7"), b"5"
_PAX, _PAX_GLOBAL, _LONG_NAME, _LONG_LINK = b"x", b"g", b"L", b"K"


class TarMember(NamedTuple):
    """A regular file inside a tar file; `offset` is where its content begins."""

    name: str
    offset: int
    num_bytes: int


class TarImages(EncodedImages):
    """The samples of tar shards, in the order of the shards' names and of their members."""

    def __init__(self, name: str, storage: Storage, index: ShardIndex, channels: int, num_classes: int | None) -> None:
        self.name = name
        self.channels = channels
        self.labels, self.num_classes = checked_labels(name, index.labels, len(index.offsets), num_classes)
        self._storage, self._index = storage, index

    def read_bytes(self, index: int) -> bytes:
        where = self._index
        return self._storage.read_at(int(where.shards[index]), int(where.offsets[index]), int(where.lengths[index]))

    def layout(self) -> Iterator[object]:
        yield [(stamp.name, stamp.num_bytes) for stamp in self._index.stamps]
        yield from (self._index.shards, self._index.offsets, self._index.lengths)

    def name_of(self, index: int) -> str:
        shard, offset = int(self._index.shards[index]), int(self._index.offsets[index])
        header = self._storage.read_at(shard, offset - BLOCK_BYTES, 100)
        member = header.partition(b"\0")[0].decode("utf-8", "replace")
        return f"{member} in {self._storage.place(shard)}"


def open_tar(path: Path, split: Split, *, channels: int = 3, num_classes: int | None = None) -> TarImages:
    """The images of a folder of tar shards, or of one shard."""
    storage = LocalFiles(tar_files(path, split))
    index = cached_index(storage.stamps, str(path.resolve()), split, lambda: index_shards(storage))
    return TarImages(f"{path.stem} {split}", storage, index, channels, num_classes)


def open_remote_tar(
    address: str,
    split: Split,
    *,
    channels: int = 3,
    num_classes: int | None = None,
    cache_folder: Path | None = None,
    cache_limit_bytes: int = CACHE_LIMIT_BYTES,
    block_bytes: int = REMOTE_BLOCK_BYTES,
) -> TarImages:
    """The images of the tar shards in a remote folder."""
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
    return TarImages(name, storage, index, channels, num_classes)


def tar_files(path: Path, split: Split) -> list[Path]:
    """The shards of a split in a folder, sorted by name; or the one shard that was given."""
    files = files_of_set(path, "tar")
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
        wanted, shown = " or ".join(SPLIT_WORDS[split]), ", ".join(names[:5])
        raise MissingSplitError(f"{place} has no shard with {wanted} in its name (found: {shown}); rename them")
    return set(names)


def index_shards(storage: Storage) -> ShardIndex:
    """Reads the headers and the labels of all shards; DataError unless each image has a label that is an integer."""
    with ThreadPoolExecutor(4) as pool:
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
    named = ((*_key_and_suffix(member), member) for member in list_members(storage, file))
    for key, run in groupby((one for one in named if one[0]), key=itemgetter(0)):
        members = [(suffix, member) for _, suffix, member in run]
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


def _key_and_suffix(member: TarMember) -> tuple[str, str]:
    """The name of the sample that a member belongs to, empty for a hidden member, and its lower-case suffix."""
    path = PurePosixPath(member.name)
    stem, _, suffix = path.name.partition(".")
    return str(path.with_name(stem)) if stem else "", suffix.lower()


def _label(content: bytes, suffix: str, where: str) -> int:
    """The integer in a `.cls` file, or under `label` or `cls` in a `.json` file."""
    shown = content[:40].decode("utf-8", "replace").strip()
    try:
        if suffix == "cls":
            value = int(content.decode("ascii").strip())
        else:
            table = parse_json(content)
            value = table["label"] if "label" in table else table["cls"]
        if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**63:
            raise TypeError
        return value
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{where} has the label '{shown}' in .{suffix}; an integer from 0 is needed") from None


def list_members(storage: Storage, file: int) -> Iterator[TarMember]:
    """The regular files of a tar file in their order, folders passed over; DataError for a damaged file or a link."""
    place, total = storage.place(file), storage.stamps[file].num_bytes
    window, window_start, at = b"", 0, 0
    said: dict[str, str] = {}  # what an extension says about the next member
    while True:
        if not window_start <= at <= at + BLOCK_BYTES <= window_start + len(window):
            window, window_start = storage.read_at(file, at, WINDOW_BYTES), at
        block = window[at - window_start : at - window_start + BLOCK_BYTES]
        if len(block) < BLOCK_BYTES:
            raise DataError(f"{place} is truncated: it ends at byte {total} without an end mark; fetch it again")
        if block.count(0) == BLOCK_BYTES:
            return
        name, num_bytes = _name_and_size(block, place, at)
        kind, content = block[156:157], at + BLOCK_BYTES
        if kind in (_PAX, _LONG_NAME):
            said |= _extension(storage.read_at(file, content, num_bytes), kind, place, at)
        elif kind not in (_PAX_GLOBAL, _LONG_LINK):
            name, num_bytes = said.get("path", name), int(said.get("size", num_bytes))
            said = {}
        at = content + -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
        if content + num_bytes > total:
            raise DataError(
                f"{place} is truncated: its member {name} ends at byte {content + num_bytes}, the file at {total}; "
                "fetch it again"
            )
        if kind in _REGULAR:
            yield TarMember(name, content, num_bytes)
        elif kind not in (_FOLDER, _PAX, _PAX_GLOBAL, _LONG_NAME, _LONG_LINK):
            raise DataError(f"{place} has {name}, a link or a device; images must be regular members: pack it again")


def tar_header(name: str, num_bytes: int) -> bytes:
    """A ustar header without owner or date: the same content gives the same bytes on any machine and day."""
    info = tarfile.TarInfo(name)
    info.size = num_bytes
    return info.tobuf(tarfile.USTAR_FORMAT)


def _name_and_size(block: bytes, place: str, at: int) -> tuple[str, int]:
    """What a ustar header says, after checking its sum."""
    try:
        stated = int(block[148:156].strip(b"\0 "), 8)
        num_bytes = int(block[124:136].strip(b"\0 ") or b"0", 8)
    except ValueError:
        raise DataError(f"{place} has no tar header at byte {at}; it is not a tar file or is damaged") from None
    if sum(block) - sum(block[148:156]) + 8 * 32 != stated:
        raise DataError(f"{place} has a damaged tar header at byte {at}: its checksum is wrong; fetch it again")
    name = block[:100].rstrip(b"\0")
    if block[257:262] == b"ustar" and (prefix := block[345:500].rstrip(b"\0")) and block[262:264] != b" \0":
        name = prefix + b"/" + name
    return name.partition(b"\0")[0].decode("utf-8", "replace"), num_bytes


def _is_count(text: bytes) -> bool:
    return text.isdigit() and len(text) < 19  # fits 64 bits


def _extension(content: bytes, kind: bytes, place: str, at: int) -> dict[str, str]:
    """The name and the size that a long-name member or a pax record gives to the next member."""
    if kind == _LONG_NAME:
        return {"path": content.rstrip(b"\0").decode("utf-8", "replace")}
    found = {}
    damaged = DataError(f"{place} has a damaged pax record at byte {at}; fetch it again")
    while content:  # "LENGTH KEY=VALUE\n", the length of the whole record
        length, blank, _ = content.partition(b" ")
        if not blank or not _is_count(length) or not len(length) < int(length) <= len(content):
            raise damaged
        key, _, value = content[len(length) + 1 : int(length) - 1].partition(b"=")
        if key == b"size" and not _is_count(value):
            raise damaged
        if key in (b"path", b"size"):
            found[key.decode()] = value.decode("utf-8", "replace")
        content = content[int(length) :]
    return found
