"""Images in folders: `train/<class>/*.jpg` and `val/<class>/*.jpg` (also jpeg, png and webp, in any case).

The class index is the place of the folder's name among the sorted class folders of `train` (of `val` when
there is no `train`), so both splits number their classes alike. Files that are no images, files outside the
class folders and hidden names are passed over; a class folder without images is an error.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

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
from megabatch.errors import DataError
from megabatch.files import read_bytes

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp")
_MAX_IMAGE_BYTES = 2**30


class FolderImages(EncodedImages):
    """One split of a folder of class folders; images are decoded when they are read."""

    def __init__(self, root: Path, split: Split, channels: int, num_classes: int | None) -> None:
        self._folder = existing_folder(root) / split
        self._classes = _class_names(root, split)
        self._files: list[str] = []
        labels: list[int] = []
        for label, class_name in enumerate(self._classes):
            files = _image_names(self._folder / class_name)
            self._files += files
            labels += [label] * len(files)
        self.name = f"{root.name} {split}"
        self.channels = channels
        self.labels, self.num_classes = checked_labels(
            self.name, np.array(labels, dtype=np.int64), len(self._files), num_classes or len(self._classes)
        )

    def name_of(self, index: int) -> str:
        return str(self._folder / self._classes[self.labels[index]] / self._files[index])

    def read_bytes(self, index: int) -> bytes:
        path = self.name_of(index)
        try:
            return read_bytes(Path(path), _MAX_IMAGE_BYTES)
        except OSError as error:
            raise DataError(f"cannot read the image {path}: {error.strerror}; restore or remove it") from error


def open_folder(
    path: Path,
    split: Split,
    *,
    channels: int = 3,
    num_classes: int | None = None,
    memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
) -> Source:
    """The images of `path/<split>/<class>/`; in memory when they are small and of one size."""
    return in_memory(FolderImages(path, split, channels, num_classes), memory_limit_bytes)


def _class_names(root: Path, split: Split) -> list[str]:
    """The class folders in the order of their indices."""
    here = _subfolders(root / split)
    if not here:
        found = ", ".join(_subfolders(root)) or "no folders"
        raise MissingSplitError(f"{root} has no {split}/<class>/ folders (found: {found}); arrange the images that way")
    everywhere = _subfolders(root / "train") or here
    if strangers := sorted(set(here) - set(everywhere)):
        raise DataError(
            f"{root / split / strangers[0]} is no class of {root / 'train'}; name the classes alike in both"
        )
    return everywhere


def _subfolders(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _image_names(folder: Path) -> list[str]:
    """The sorted names of the images in a class folder; empty when this split lacks the class."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        names = [e.name for e in entries if e.name.lower().endswith(EXTENSIONS) and not e.name.startswith(".")]
    if not names:
        raise DataError(f"{folder} has no images ({', '.join(EXTENSIONS)}); fill the class folder or remove it")
    return sorted(names)
