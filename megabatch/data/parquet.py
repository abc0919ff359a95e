"""Images in parquet files as on the Hugging Face hub: `image: struct{bytes, path}` and an integer `label`.

Files are chosen by the first word of their name: `train` for train; `validation`, `valid`, `val`, else `test`
for val (test splits often come without labels). A folder whose files all share another first word has no
splits: it serves whichever split is asked for, so train and val are then the same images.

A parquet file is read a row group at a time. Row groups are cached in memory up to a limit; a set whose encoded
images exceed it pays a row group's reading for nearly every image of a shuffled order, so write big sets
with small row groups (about 100 rows), or as another kind.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from megabatch.data.index import ShardIndex, cached_index
from megabatch.data.sources import (
    MEMORY_LIMIT_BYTES,
    EncodedImages,
    MissingSplitError,
    Split,
    checked_labels,
    files_of_set,
)
from megabatch.data.storage import FileStamp, LocalFiles
from megabatch.errors import DataError

ENCODED_BYTES = 256 * 2**20
"""Row groups are cached up to so much at least: with fewer, threads that read side by side would drop each other's."""

FIRST_WORDS = {"train": ("train",), "val": ("validation", "valid", "val", "test")}


class ParquetImages(EncodedImages):
    """The rows of parquet files in order; images are decoded when they are read."""

    def __init__(
        self,
        name: str,
        files: list[Path],
        channels: int,
        num_classes: int | None,
        image_column: str,
        label_column: str,
        memory_limit_bytes: int,
    ) -> None:
        self.name, self.channels, self._column = name, channels, image_column
        columns = f"{image_column} {label_column}"
        stamps = LocalFiles(files).stamps
        index = cached_index(
            stamps, str(files[0].resolve().parent), columns, lambda: _index(files, stamps, image_column, label_column)
        )
        num_rows = len(index.labels)
        is_main = np.ones(num_rows, dtype=np.bool_)  # of its row group
        is_main[1:] = (np.diff(index.shards.astype(np.int64)) != 0) | (np.diff(index.offsets) != 0)
        first_rows = np.flatnonzero(is_main)
        self._sizes = [(stamp.name, stamp.num_bytes) for stamp in stamps]
        self._groups = [(files[index.shards[row]], int(index.offsets[row])) for row in first_rows.tolist()]
        self._starts = np.append(first_rows, num_rows)
        self._metadata: dict[Path, Any] = {}
        self.labels, self.num_classes = checked_labels(name, index.labels, num_rows, num_classes)
        self._cached: OrderedDict[int, Any] = OrderedDict()  # row group -> encoded images, longest unused first
        self._cached_bytes, self._limit_bytes = 0, memory_limit_bytes
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cached": OrderedDict(), "_cached_bytes": 0, "_lock": None, "_metadata": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"_lock": threading.Lock()})

    def layout(self) -> Iterator[object]:
        yield from (self._sizes, self._starts)

    def read_bytes(self, index: int) -> bytes:
        group, row = self._place(index)
        encoded = self._row_group(group)[row].as_buffer()
        if encoded is None:
            raise DataError(f"the image {self.name_of(index)} has no bytes; replace or remove the row")
        return bytes(encoded)

    def name_of(self, index: int) -> str:
        group, _ = self._place(index)
        file, group_in_file = self._groups[group]
        first_row_of_file = int(self._starts[group - group_in_file])
        return f"in row {index - first_row_of_file} of {file}"

    def _place(self, index: int) -> tuple[int, int]:
        """The row group of an image, and its row within that."""
        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        return group, index - int(self._starts[group])

    def _row_group(self, group: int) -> Any:
        """The encoded images of a row group as an Arrow array, from memory when they are cached."""
        with self._lock:
            if group in self._cached:
                self._cached.move_to_end(group)
                return self._cached[group]
        file, group_in_file = self._groups[group]
        # Opened anew for every row group: no handle is shared between threads or inherited by forked processes.
        try:
            with pq.ParquetFile(file, metadata=self._metadata.get(file)) as opened:
                self._metadata[file] = opened.metadata
                table = opened.read_row_group(group_in_file, columns=[f"{self._column}.bytes"], use_threads=False)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"cannot read row group {group_in_file} of {file}: {error}; fetch it again") from error
        encoded = pc.struct_field(table.column(self._column), "bytes")
        if len(encoded) != (stated := int(self._starts[group + 1] - self._starts[group])):
            raise DataError(f"row group {group_in_file} of {file} has {len(encoded)} rows of {stated}; fetch it again")
        with self._lock:
            if group not in self._cached:
                self._cached[group] = encoded
                self._cached_bytes += encoded.nbytes
            while self._cached_bytes > self._limit_bytes and len(self._cached) > 1:
                _, dropped = self._cached.popitem(last=False)
                self._cached_bytes -= dropped.nbytes
        return encoded


def open_parquet(
    path: Path,
    split: Split,
    *,
    channels: int = 3,
    num_classes: int | None = None,
    image_column: str = "image",
    label_column: str = "label",
    memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
) -> ParquetImages:
    """The images of a folder of parquet files, or of one file; at most so many bytes of them stay in memory."""
    files, group = choose_files(path, split)
    name, limit = f"{path.stem} {group}", max(memory_limit_bytes, ENCODED_BYTES)
    return ParquetImages(name, files, channels, num_classes, image_column, label_column, limit)


def choose_files(path: Path, split: Split) -> tuple[list[Path], str]:
    """The files of a split, sorted by name, and the first word of their names; see the head of this file."""
    files = files_of_set(path, "parquet")
    groups: dict[str, list[Path]] = {}
    for file in files:
        first_word = re.split(r"[-_.0-9]", file.stem.lower(), maxsplit=1)[0]
        groups.setdefault(first_word, []).append(file)
    for word in FIRST_WORDS[split]:
        if word in groups:
            return groups[word], word
    only, *others = groups
    split_words = {word for words in FIRST_WORDS.values() for word in words}
    if not others and only not in split_words:
        return groups[only], only or split
    wanted = " or ".join(f"{word}-*.parquet" for word in FIRST_WORDS[split])
    found = ", ".join(sorted(f.name for f in files)[:5])
    raise MissingSplitError(f"{path} has no {wanted} (found: {found}); rename the files")


def _index(files: list[Path], stamps: tuple[FileStamp, ...], image_column: str, label_column: str) -> ShardIndex:
    """For each row: its file, its row group (as the offset), its place in that (as the length), its label."""
    groups, labels = [], []
    for number, file in enumerate(files):
        metadata, file_labels = _inspect(file, image_column, label_column)
        groups += [(number, group, metadata.row_group(group).num_rows) for group in range(metadata.num_row_groups)]
        labels.append(file_labels)
    shards, offsets, counts = np.array(groups, dtype=np.int64).reshape(-1, 3).T
    rows = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return ShardIndex(
        stamps,
        np.repeat(shards, counts).astype(np.uint32),
        np.repeat(offsets, counts),
        rows.astype(np.uint32),
        np.concatenate(labels),
    )


def _inspect(file: Path, image_column: str, label_column: str) -> tuple[Any, NDArray[Any]]:
    """A file's metadata and labels; DataError unless it has both columns with the right types."""
    try:
        with pq.ParquetFile(file) as opened:
            schema, metadata = opened.schema_arrow, opened.metadata
            found = ", ".join(f"{field.name}: {field.type}" for field in schema)
            for column in (image_column, label_column):
                if (count := schema.names.count(column)) > 1:
                    raise DataError(f"{file} has {count} columns '{column}'; write it again with one")
            image = schema.field(image_column).type if image_column in schema.names else pa.null()
            # A struct with two fields of the name has no index for it.
            place = image.get_field_index("bytes") if pa.types.is_struct(image) else -1
            content = image.field(place).type if place >= 0 else pa.null()
            if not (pa.types.is_binary(content) or pa.types.is_large_binary(content)):
                raise DataError(
                    f"{file} has no column '{image_column}: struct{{bytes, path}}' (found: {found}); "
                    "name it with image_column"
                )
            if label_column not in schema.names or not pa.types.is_integer(schema.field(label_column).type):
                raise DataError(
                    f"{file} has no column '{label_column}' of integers (found: {found}); name it with label_column"
                )
            labels = opened.read(columns=[label_column], use_threads=False).column(label_column)
            counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
            if min(counts, default=0) < 0 or sum(counts) != len(labels):
                raise DataError(f"{file} has {len(labels)} rows in groups of {sum(counts)} in all; fetch it again")
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"cannot read {file} as parquet: {error}; fetch it again") from error
    if labels.null_count:
        row = int(np.flatnonzero(labels.is_null().to_numpy())[0])
        raise DataError(f"the label at index {row} of {file} is missing; every row needs an integer label")
    return metadata, labels.to_numpy()
