"""Decoded images in memory-mapped files: nothing is left to do at training time but cut and scale.

`train-00000.raw` holds the pixels of one image after the other, `train-00000.npz` beside it where each begins, its
height, its width and its label. The system holds the file in memory once for all ranks of a host and gives the memory
back when others need it. `megabatch data pack --to raw --resize 256` writes such a set.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megabatch.data.index import read_arrays
from megabatch.data.jpeg import Pixels
from megabatch.data.sources import MissingSplitError, Source, Split, checked_labels, existing_folder
from megabatch.errors import DataError
from megabatch.files import open_regular, write_atomically

_MAX_SIDE = 2**24


class RawImages(Source):
    """The images of `path/<split>-*.raw`; reading one is a view of the mapped file."""

    def __init__(self, path: Path, split: Split, *, num_classes: int | None = None) -> None:
        self.name = f"{path.stem} {split}"
        self._files = files = raw_files(path, split)
        tables = [_table(file) for file in files]
        self.channels = int(tables[0]["channels"])
        if any(int(table["channels"]) != self.channels for table in tables):
            raise DataError(f"the files of {self.name} have different numbers of channels; pack the set again")
        self._shapes = np.concatenate([table["shapes"] for table in tables])
        self._offsets = np.concatenate([table["offsets"] for table in tables])
        self._starts = np.cumsum([0] + [len(table["offsets"]) for table in tables])
        labels = np.concatenate([table["labels"] for table in tables])
        self.labels, self.num_classes = checked_labels(self.name, labels, len(self._offsets), num_classes)
        self._maps = [np.memmap(file, dtype=np.uint8, mode="r") for file in files]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": []}  # another process maps the files itself

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._maps = [np.memmap(file, dtype=np.uint8, mode="r") for file in self._files]

    def read(self, index: int) -> Pixels:
        file = self._file_of(index)
        height, width = (int(side) for side in self._shapes[index])
        start = int(self._offsets[index])
        pixels = self._maps[file][start : start + height * width * self.channels]
        return pixels.reshape(height, width, self.channels).view(np.ndarray)

    def layout(self) -> Iterator[object]:
        yield [file.name for file in self._files]
        yield from (self._shapes, self._offsets)

    def name_of(self, index: int) -> str:
        file = self._file_of(index)
        return f"{index - int(self._starts[file])} of {self._files[file]}"

    def _file_of(self, index: int) -> int:
        return int(np.searchsorted(self._starts, index, side="right")) - 1


def raw_files(path: Path, split: Split) -> list[Path]:
    files = sorted(existing_folder(path).glob(f"{split}-*.raw"))
    if not files:
        raise MissingSplitError(f"{path} has no {split}-*.raw files; make them with `megabatch data pack --to raw`")
    return files


def write_raw_table(file: Path, shapes: list[tuple[int, int]], labels: list[int], channels: int) -> None:
    """The table beside a raw file, whose images lie one after the other in the order of `shapes`."""
    sizes = np.array([height * width * channels for height, width in shapes], dtype=np.int64)
    out = io.BytesIO()
    np.savez(
        out,
        channels=np.int64(channels),
        shapes=np.array(shapes, dtype=np.int32).reshape(-1, 2),
        offsets=np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64),
        labels=np.array(labels, dtype=np.int64),
    )
    write_atomically(file.with_suffix(".npz"), out.getvalue())


def _table(file: Path) -> dict[str, NDArray[Any]]:
    """The table of a raw file, checked against the file's size."""
    beside = file.with_suffix(".npz")
    try:
        with open_regular(beside) as opened:
            stored = read_arrays(opened)
        table = {name: stored[name] for name in ("channels", "shapes", "offsets", "labels")}
        with open_regular(file) as opened:
            found = os.fstat(opened.fileno()).st_size
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"cannot read {beside}: {error}; pack the set again") from error
    channels, shapes, offsets = (table[name] for name in ("channels", "shapes", "offsets"))
    kinds = channels.dtype.kind + shapes.dtype.kind + offsets.dtype.kind
    if kinds.strip("iu") or channels.shape != () or channels not in (1, 3) or shapes.shape != (*offsets.shape, 2):
        raise DataError(f"{beside} is no table of sizes and offsets; pack the set again")
    if shapes.size and not 1 <= shapes.min() <= shapes.max() <= _MAX_SIDE:
        raise DataError(f"{beside} has an image of no possible size; pack the set again")
    sizes = shapes.astype(np.int64).prod(axis=1) * int(channels)
    if found != sizes.sum():
        raise DataError(f"{file} has {found} bytes, its table asks for {sizes.sum()}; fetch it again")
    if not np.array_equal(offsets, np.cumsum(sizes) - sizes):
        raise DataError(f"{beside} has offsets that are not those of images one after the other; pack the set again")
    return table
