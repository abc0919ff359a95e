"""A fixed part of a set of images, and small copies of images that lie in memory: what studies on few cores need.

All images of a set are laid in one fixed order whose every beginning and end has the set's own mix of classes. A
limited training set is a beginning of it and held-out images are an end, so that the two never meet, and neither
depends on the seed of a run: runs that differ in their seed still train on the same images.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from megabatch.data.sources import MEMORY_LIMIT_BYTES, HasBytes, ImageArray, Source, image_name, in_memory
from megabatch.errors import DataError

__all__ = ["EncodedSubset", "Subset", "downscale", "limit_and_hold_out", "mixed_order"]

_ORDER_KEY = 0x6D656761  # any constant: the order is part of what a study says it measured


class Subset:
    """The images of `source` at `indices`, in that order."""

    def __init__(self, name: str, source: Source, indices: NDArray[np.int64]) -> None:
        self.name = name
        self.num_classes = source.num_classes
        self.channels = source.channels
        self.labels = source.labels[indices]
        self._source = source
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, index: int) -> NDArray[np.uint8]:
        return self._source.read(int(self._indices[index]))

    def name_of(self, index: int) -> str:
        return image_name(self._source, int(self._indices[index]))


class EncodedSubset(Subset):
    """A part of a source of encoded images, which hands out their bytes as the source does."""

    def read_bytes(self, index: int) -> bytes:
        assert isinstance(self._source, HasBytes)
        return self._source.read_bytes(int(self._indices[index]))


def mixed_order(labels: NDArray[np.int64]) -> NDArray[np.int64]:
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
    decoded = source if isinstance(source, ImageArray) else in_memory(source, MEMORY_LIMIT_BYTES)
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
    return ImageArray(f"{source.name} at {image_size} px", small, decoded.labels, decoded.num_classes)


def _taken(name: str, source: Source, indices: NDArray[np.int64]) -> Source:
    if isinstance(source, ImageArray):
        return ImageArray(name, source.images[indices], source.labels[indices], source.num_classes)
    return in_memory((EncodedSubset if isinstance(source, HasBytes) else Subset)(name, source, indices))
