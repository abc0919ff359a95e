"""Decoded images in memory-mapped files: nothing is left to do at training time but cut and scale.

`train-00000.raw` holds the pixels of one image after the other, `train-00000.npz` beside it where each begins, its
height, its width and its label. The system holds the file in memory once for all ranks of a host and gives the memory
back when others need it. `megabatch data pack --to raw --resize 256` writes such a set.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megabatch.data.sources import MissingSplitError, Source, Split, checked_labels, existing_folder
from megabatch.errors import DataError
from megabatch.files import write_atomically

__all__ = ["RawImages", "open_raw", "raw_files", "write_raw_table"]


class RawImages:
    """The images of raw files; reading one is a view of the mapped file."""

    def __init__(self, name: str, files: list[Path], num_classes: int | None) -> None:
        self.name = name
        self._files = files
        tables = [_table(file) for file in files]
        self.channels = int(tables[0]["channels"])
        if any(int(table["channels"]) != self.channels for table in tables):
            raise DataError(f"the files of {name} have different numbers of channels; pack the set again")
        self._shapes = np.concatenate([table["shapes"] for table in tables])
        self._offsets = np.concatenate([table["offsets"] for table in tables])
        self._starts = np.cumsum([0] + [len(table["offsets"]) for table in tables])
        labels = np.concatenate([table["labels"] for table in tables])
        self.labels, self.num_classes = checked_labels(name, labels, len(self._offsets), num_classes)
        self._maps = [np.memmap(file, dtype=np.uint8, mode="r") for file in files]

    def __len__(self) -> int:
        return len(self.labels)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": []}  # another process maps the files itself

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._maps = [np.memmap(file, dtype=np.uint8, mode="r") for file in self._files]

    def read(self, index: int) -> NDArray[np.uint8]:
        file = int(np.searchsorted(self._starts, index, side="right")) - 1
        height, width = (int(side) for side in self._shapes[index])
        start = int(self._offsets[index])
        pixels = self._maps[file][start : start + height * width * self.channels]
        return pixels.reshape(height, width, self.channels).view(np.ndarray)

    def name_of(self, index: int) -> str:
        file = int(np.searchsorted(self._starts, index, side="right")) - 1
        return f"{index - int(self._starts[file])} of {self._files[file]}"


def open_raw(path: Path, split: Split, *, num_classes: int | None = None) -> Source:
    """The images of `path/<split>-*.raw`."""
    return RawImages(f"{path.stem} {split}", raw_files(path, split), num_classes)


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
        with open(beside, "rb") as opened, np.load(opened, allow_pickle=False) as stored:
            table = {name: stored[name] for name in ("channels", "shapes", "offsets", "labels")}
        needed = int(table["shapes"].astype(np.int64).prod(axis=1).sum()) * int(table["channels"])
        found = file.stat().st_size
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"cannot read {beside}: {error}; pack the set again") from error
    if found != needed:
        raise DataError(f"{file} has {found} bytes, its table asks for {needed}; fetch it again")
    return table
