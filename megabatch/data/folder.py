"""Images in folders: `train/<class>/*.jpg` and `val/<class>/*.jpg` (also jpeg, png and webp, in any case).

A folder of class folders alone, `<class>/*.jpg`, is split: in each class a fifth of the images, at least one, is for
validation, those whose SHA-256 of `<class>/<file>` is smallest. The rule looks at names only. So it gives the same
split on every machine, and an image that is added moves at most one other image of its class.

The class index is the place of the folder's name among the sorted class folders of `train` (of `val` when
there is no `train`), so both splits number their classes alike. Files that are no images, files outside the
class folders and hidden names are passed over; a class folder without images is an error.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megabatch.data.sources import EncodedImages, MissingSplitError, Split, checked_labels, existing_folder
from megabatch.errors import DataError, some_names
from megabatch.files import read_bytes

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp")
VAL_SHARE = 0.2
_KNOWN = ", ".join(EXTENSIONS)
_MAX_IMAGE_BYTES = 2**30
_SIZES_LOOKED_AT = 256  # of all files: asking a shared disk for every one takes minutes


class FolderImages(EncodedImages):
    """One split of a folder of class folders; images are decoded when they are read."""

    def __init__(self, root: Path, split: Split, *, channels: int = 3, num_classes: int | None = None) -> None:
        is_flat = is_flat_folder(existing_folder(root))
        self._folder = root if is_flat else root / split
        self._classes = _subfolders(root) if is_flat else _class_names(root, split)
        self._files: list[str] = []
        labels: list[int] = []
        found = _images_by_class(self._folder, self._classes)
        for label, (class_name, files) in enumerate(found.items()):
            if is_flat:
                files = _side(self._folder / class_name, files, split)
            self._files += files
            labels += [label] * len(files)
        self.name = f"{root.name} {split}"
        self.channels = channels
        self.class_names = tuple(self._classes)
        self.labels, self.num_classes = checked_labels(
            self.name, np.array(labels, dtype=np.int64), len(self._files), num_classes or len(self._classes)
        )

    def name_of(self, index: int) -> str:
        return str(self._folder / self._classes[self.labels[index]] / self._files[index])

    def layout(self) -> Iterator[object]:
        yield self._files
        for index in range(0, len(self), -(-len(self) // _SIZES_LOOKED_AT)):
            path = Path(self.name_of(index))
            yield path.stat().st_size if path.is_file() else None

    def read_bytes(self, index: int) -> bytes:
        path = self.name_of(index)
        try:
            return read_bytes(Path(path), _MAX_IMAGE_BYTES)
        except OSError as error:
            raise DataError(f"cannot read the image {path}: {error.strerror}; restore or remove it") from error


def is_flat_folder(root: Path) -> bool:
    """Whether class folders lie in the folder itself: no train/ or val/, and images in one of its folders."""
    names = _subfolders(root)
    return "train" not in names and "val" not in names and any(_has_image(root / name) for name in names)


def empty_class_folders(root: Path) -> list[str]:
    """The folders in a folder that has no images in any of them: class folders that somebody forgot to fill."""
    names = _subfolders(root)
    return [] if any(_has_image(root / name) for name in names) else names


def _has_image(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return any(entry.name.lower().endswith(EXTENSIONS) for entry in entries)


def _side(folder: Path, names: list[str], split: Split) -> list[str]:
    """The images of a class that belong to a split, in the order of their names."""
    if len(names) < 2:
        raise DataError(f"{folder} has one image, a class needs two to be split; add images or remove the class")
    keys = {name: hashlib.sha256(f"{folder.name}/{name}".encode(errors="surrogateescape")).digest() for name in names}
    for_val = set(sorted(names, key=keys.__getitem__)[: max(1, round(VAL_SHARE * len(names)))])
    return [name for name in names if (name in for_val) == (split == "val")]


def _class_names(root: Path, split: Split) -> list[str]:
    """The class folders in the order of their indices."""
    here = _subfolders(root / split)
    if not here:
        found = some_names(_subfolders(root)) or "no folders"
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


def _images_by_class(folder: Path, class_names: list[str]) -> dict[str, list[str]]:
    """The sorted names of the images by class; none where this split lacks the folder, DataError if it is empty."""
    found = {name: _image_names(folder / name) for name in class_names}
    empty = [name for name, files in found.items() if not files and (folder / name).is_dir()]
    if len(empty) == 1:
        raise DataError(f"{folder / empty[0]} has no images ({_KNOWN}); fill the class folder or remove it")
    if empty:
        raise DataError(
            f"{folder} has {len(empty)} class folders without images ({_KNOWN}): {some_names(empty)}; "
            "fill them or remove them"
        )
    return found


def _image_names(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        names = [e.name for e in entries if e.name.lower().endswith(EXTENSIONS) and not e.name.startswith(".")]
    return sorted(names)
