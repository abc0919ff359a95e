"""What a set of labelled images must offer, what the kinds of sets share, and fixed parts of a set.

A new kind joins as a `Source`, passing the shared suite in the tests and getting a line in `megabatch.data.formats`.
Images are random access: the order of training, its sharding over ranks and its resumption are decided elsewhere, from
indices alone.

Studies on few cores use a part of a set. All images are laid in one fixed order whose every beginning and end has the
set's own mix of classes. A limited training set is a beginning of it and held-out images are an end, so that the two
never meet, and neither depends on the seed of a run: runs that differ in their seed still train on the same images.
"""

from __future__ import annotations

import abc
import copy
import hashlib
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image

from megabatch.data.decode import decode_image
from megabatch.data.jpeg import Pixels
from megabatch.data.randomness import Ints
from megabatch.errors import DataError, some_names
from megabatch.machine import usable_cores

Split = Literal["train", "val"]

MEMORY_LIMIT_BYTES = 512 * 2**20
"""A set of one image size that needs no more than this is decoded once and stays in memory (CIFAR-10: 147 MiB)."""

_CHUNK_IMAGES = 256
_MAX_CLASSES = 2**24  # every class costs a row of weights, and a count
_ORDER_KEY = 0x6D656761  # any constant: the order is part of what a study says it measured


class MissingSplitError(DataError):
    """A set without a trace of the split that was asked for; the other split may well be there."""


class Source(abc.ABC):
    """Labelled images with random access; safe to read from several threads at once."""

    name: str  # for people and for the run's records
    num_classes: int
    channels: int  # 1 or 3
    labels: Ints  # one for each image, all in 0 .. num_classes - 1
    class_names: tuple[str, ...] = ()  # by label; empty where the set has none

    def __len__(self) -> int:
        return len(self.labels)

    @abc.abstractmethod
    def read(self, index: int) -> Pixels:
        """The decoded image, [height, width, channels]; DataError naming it when it is unreadable."""

    def read_bytes(self, index: int) -> bytes | None:
        """The image as it is stored (JPEG, PNG or WebP), DataError when it is unreadable; None if stored as pixels."""
        return None

    def name_of(self, index: int) -> str:
        """Which image it is, for people: a path, or a member and its shard."""
        return f"{index} of {self.name}"

    def layout(self) -> Iterator[object]:
        """What is known of the images without reading them: names, sizes, places; the same on every host."""
        yield from ()


class EncodedImages(Source):
    """A source that knows where the bytes are; decoding them is the same for all kinds."""

    @abc.abstractmethod
    def read_bytes(self, index: int) -> bytes: ...

    def read(self, index: int) -> Pixels:
        return decode_image(self.read_bytes(index), self.channels, lambda: self.name_of(index))


class ImageArray(Source):
    """A source whose images all have one size and lie decoded in memory."""

    def __init__(
        self,
        name: str,
        images: Pixels,
        labels: ArrayLike,
        num_classes: int | None = None,
        class_names: tuple[str, ...] = (),
        named_by: Source | None = None,
    ) -> None:
        """named_by: where the images came from, in the same order; it knows their names."""
        assert images.dtype == np.uint8
        assert images.ndim == 4
        assert images.shape[3] in (1, 3)
        self.name, self.class_names = name, class_names
        self.labels, self.num_classes = checked_labels(name, labels, len(images), num_classes)
        self.channels: int = images.shape[3]
        # Readers get views; one that wrote into its image would change it for every later epoch.
        self.images = np.ascontiguousarray(images).view()
        self.images.flags.writeable = False
        self.named_by = named_by

    def read(self, index: int) -> Pixels:
        image: Pixels = self.images[index]
        return image

    def name_of(self, index: int) -> str:
        return self.named_by.name_of(index) if self.named_by else super().name_of(index)

    def layout(self) -> Iterator[object]:
        yield self.images.shape
        yield zlib.crc32(self.images.data)  # they are in memory: 1 GB a second


def digest_of_set(source: Source) -> str:
    """A short digest of a set, without reading its images: whether two hosts have the same one."""
    digest = hashlib.sha256(np.ascontiguousarray(source.labels).tobytes())
    for part in (source.num_classes, source.channels, source.class_names, *source.layout()):
        digest.update(part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode(errors="surrogateescape"))
        digest.update(b"\0")
    return digest.hexdigest()[:8]


def names_of(source: Source) -> tuple[str, ...]:
    """The classes by label; those without a name, and those of a head larger than the set, by their number."""
    return source.class_names + tuple(str(label) for label in range(len(source.class_names), source.num_classes))


def check_same_classes(train: Source, val: Source) -> None:
    """Raises DataError unless both splits have the same number of classes and of channels."""
    for what in ("num_classes", "channels"):
        for_train, for_val = getattr(train, what), getattr(val, what)
        if for_train != for_val:
            raise DataError(
                f"{what} is {for_train} in {train.name} but {for_val} in {val.name}; both splits must agree, "
                f"so give {what} for both or correct the set"
            )


def checked_labels(name: str, labels: ArrayLike, num_images: int, num_classes: int | None) -> tuple[Ints, int]:
    """The labels as int64 and the number of classes (given, or the largest label + 1).

    Raises DataError, naming the first offending index and value, unless there is one label for each image
    and each is an integer in 0 .. num_classes - 1.
    """
    if num_classes is not None and num_classes < 1:
        raise DataError(f"num_classes is {num_classes} for {name}; it must be at least 1")
    given = np.asarray(labels)
    if num_images == 0 and given.size == 0:
        raise DataError(f"{name} has no images; give a set with at least one")
    if given.ndim != 1:
        raise DataError(f"the labels of {name} have shape {given.shape}; one integer for each image is needed")
    if len(given) != num_images:
        index = min(len(given), num_images)
        what = f"label {given[index]} at index {index} has no image" if index < len(given) else ""
        raise DataError(
            f"{name} has {num_images} images and {len(given)} labels: "
            f"{what or f'the image at index {index} has no label'}; the files do not belong together"
        )
    if given.dtype.kind not in "iu":
        raise DataError(f"the label at index 0 of {name} is {given[0]!r}; labels must be integers from 0")
    top = min(int(given.max()) + 1, _MAX_CLASSES) if num_classes is None else num_classes
    wrong = np.flatnonzero((given < 0) | (given >= top))
    if wrong.size:
        index = int(wrong[0])
        raise DataError(
            f"the label at index {index} of {name} is {given[index]}; labels must be 0 .. {top - 1}"
            + ("" if num_classes is None else f", or num_classes larger than {num_classes}")
        )
    return given.astype(np.int64), top


def in_memory(source: Source, limit_bytes: int = MEMORY_LIMIT_BYTES) -> Source:
    """The same images decoded in memory if all can be read, have one size and fit the limit, else the source itself.

    Decoding releases the interpreter lock, so threads help - except for thumbnails, where Python dominates.
    """
    if limit_bytes <= 0:
        return source
    try:
        size = source.read(0).shape
    except DataError:  # whoever reads the images decides about broken ones
        return source
    if len(source) * int(np.prod(size)) > limit_bytes:
        return source
    images = np.empty((len(source), *size), dtype=np.uint8)

    def fill(start: int) -> bool:
        for index in range(start, min(start + _CHUNK_IMAGES, len(source))):
            try:
                image = source.read(index)
            except DataError:
                return False
            if image.shape != size:
                return False
            images[index] = image
        return True

    with ThreadPoolExecutor(min(8, usable_cores())) as pool:
        for all_fit in pool.map(fill, range(0, len(source), _CHUNK_IMAGES)):
            if not all_fit:
                pool.shutdown(cancel_futures=True)
                return source
    # A copy, as for another process: what the source has cached of the encoded images is not kept.
    named_by = copy.copy(source)
    return ImageArray(source.name, images, source.labels, source.num_classes, source.class_names, named_by)


def existing_folder(path: Path) -> Path:
    """The path itself; DataError unless it is a folder."""
    if not path.is_dir():
        problem = "is not a folder" if path.exists() else "does not exist"
        raise DataError(f"the data path {path} {problem}; give the folder that holds the images")
    return path


def files_of_set(path: Path, suffix: str) -> list[Path]:
    """The file that was given, or the files of that suffix in the folder, sorted by name; DataError for none."""
    files = [path] if path.is_file() else sorted(existing_folder(path).glob(f"*.{suffix}"))
    if not files:
        raise DataError(f"{path} has no *.{suffix} files; give the folder that holds them")
    return files


class Subset(Source):
    """The images of `source` at `indices`, in that order."""

    def __init__(self, name: str, source: Source, indices: Ints) -> None:
        self.name, self.num_classes, self.channels = name, source.num_classes, source.channels
        self.labels, self.class_names = source.labels[indices], source.class_names
        self._source, self._indices = source, indices

    def read(self, index: int) -> Pixels:
        return self._source.read(int(self._indices[index]))

    def read_bytes(self, index: int) -> bytes | None:
        return self._source.read_bytes(int(self._indices[index]))

    def name_of(self, index: int) -> str:
        return self._source.name_of(int(self._indices[index]))

    def layout(self) -> Iterator[object]:
        yield self._indices
        yield from self._source.layout()


class Relabelled(Source):
    """The images of `source` with other labels, for classes of other names."""

    def __init__(self, source: Source, labels: Ints, class_names: tuple[str, ...]) -> None:
        self.name, self.num_classes, self.channels = source.name, len(class_names), source.channels
        self.labels, self.class_names = labels, class_names
        self._source = source

    def read(self, index: int) -> Pixels:
        return self._source.read(index)

    def read_bytes(self, index: int) -> bytes | None:
        return self._source.read_bytes(index)

    def name_of(self, index: int) -> str:
        return self._source.name_of(index)


def labelled_by_name(source: Source, class_names: tuple[str, ...]) -> Source:
    """The same images, each with the label that its class has in `class_names`; DataError for an unknown class."""
    place = {name: label for label, name in enumerate(class_names)}
    if strangers := [name for name in source.class_names if name not in place]:
        raise DataError(
            f"{source.name} has {some_names(strangers)}, which the model does not know; it knows "
            f"{some_names(class_names)}: give images of these classes, in folders of these names"
        )
    if source.class_names == class_names:
        return source
    labels = np.array([place[name] for name in source.class_names], dtype=np.int64)[source.labels]
    return Relabelled(source, labels, class_names)


def mixed_order(labels: Ints) -> Ints:
    """A permutation of the images in which every beginning and every end has each class in its share, within one."""
    keys = np.random.Philox(key=np.array([_ORDER_KEY, 0], dtype=np.uint64)).random_raw(len(labels))
    shuffled = np.argsort(keys, kind="stable")
    place = np.empty(len(labels), dtype=np.float64)  # how far through its own class an image comes, 0 .. 1
    for label in np.unique(labels):
        members = shuffled[labels[shuffled] == label]
        place[members] = (np.arange(len(members)) + 0.5) / len(members)
    return shuffled[np.argsort(place[shuffled], kind="stable")].astype(np.int64, copy=False)


def limit_and_hold_out(train: Source, max_train_images: int, held_out_images: int) -> tuple[Source, Source | None]:
    """The training images to use (0: all that are not held out) and those held out (0: none), never the same one."""
    wanted = max_train_images + held_out_images
    if wanted > len(train) or held_out_images == len(train):
        raise DataError(
            f"data.max_train_images {max_train_images} and data.held_out_images {held_out_images} need more "
            f"images than the {len(train)} of {train.name}; ask for fewer"
        )
    if not wanted:
        return train, None
    order = mixed_order(train.labels)
    num_train = max_train_images or len(train) - held_out_images
    chosen = _taken(f"{train.name}, {num_train} images", train, np.sort(order[:num_train]))
    if not held_out_images:
        return chosen, None
    return chosen, _taken(f"{train.name}, {held_out_images} held out", train, np.sort(order[-held_out_images:]))


def downscale(source: Source, image_size: int) -> Source:
    """Square images of one size made `image_size` wide by area averaging, in memory; smaller ones stay as they are.

    Raises DataError when the images do not fit into memory, differ in size or are not square.
    """
    decoded = source if isinstance(source, ImageArray) else in_memory(source)
    if not isinstance(decoded, ImageArray) or decoded.images.shape[1] != decoded.images.shape[2]:
        raise DataError(
            f"data.downscale needs square images of one size that fit into memory, those of {source.name} do not; "
            "leave it out, or limit data.max_train_images"
        )
    if decoded.images.shape[1] <= image_size:
        return decoded
    small = np.empty((len(decoded), image_size, image_size, decoded.channels), dtype=np.uint8)
    for index, image in enumerate(decoded.images):
        pil = Image.fromarray(image.squeeze(2) if decoded.channels == 1 else image)
        averaged = np.asarray(pil.resize((image_size, image_size), Image.Resampling.BOX))
        small[index] = averaged.reshape(image_size, image_size, decoded.channels)
    name = f"{source.name} at {image_size} px"
    return ImageArray(name, small, decoded.labels, decoded.num_classes, decoded.class_names, decoded.named_by)


def _taken(name: str, source: Source, indices: Ints) -> Source:
    if isinstance(source, ImageArray):
        named_by = Subset(name, source.named_by, indices) if source.named_by else None
        labels = source.labels[indices]
        return ImageArray(name, source.images[indices], labels, source.num_classes, source.class_names, named_by)
    return in_memory(Subset(name, source, indices))
