"""Images and labels in idx files: MNIST, Fashion-MNIST and whatever else is stored that way.

The format (Yann LeCun's description of MNIST): two zero bytes, a type byte (8 for unsigned bytes), the number
of dimensions, each dimension as a big-endian 32-bit number, then the values in C order. Files may be gzipped.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megabatch.data.downloads import find_fashion_mnist, path_of
from megabatch.data.sources import ImageArray, Split, existing_folder
from megabatch.data.storage import default_cache
from megabatch.errors import DataError

__all__ = ["open_fashion_mnist", "open_idx", "open_mnist", "read_idx"]

UNSIGNED_BYTES = 8
FILE_PREFIX = {"train": "train", "val": "t10k"}


def open_idx(path: Path, split: Split, *, num_classes: int | None = None) -> ImageArray:
    """The grey images of `train-images-idx3-ubyte[.gz]` and its labels, or those of `t10k-*` for val."""
    return _open(existing_folder(path), split, f"{path.name} {split}", num_classes)


def open_mnist(path: Path, split: Split, *, num_classes: int | None = 10) -> ImageArray:
    """MNIST's handwritten digits from a folder of its four files."""
    return _open(existing_folder(path), split, f"mnist {split}", num_classes)


def open_fashion_mnist(path: Path | None, split: Split, *, num_classes: int | None = 10) -> ImageArray:
    """Fashion-MNIST from a folder, or from where it lies on this machine; nothing is downloaded here."""
    folder = find_fashion_mnist(default_cache()) if path is None else existing_folder(path)
    return _open(folder, split, f"fashion-mnist {split}", num_classes)


def read_idx(path: Path, num_dims: int) -> NDArray[np.uint8]:
    """The unsigned bytes of an idx file with `num_dims` dimensions, read-only; DataError when damaged."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}; fetch the file again") from error
    magic = bytes([0, 0, UNSIGNED_BYTES, num_dims])
    if content[:4] != magic:
        raise DataError(
            f"{path} begins with {content[:4].hex() or 'nothing'}; an idx file of unsigned bytes with "
            f"{num_dims} dimensions begins with {magic.hex()}, so this is another kind of file"
        )
    header_bytes = 4 + 4 * num_dims
    if len(content) < header_bytes:
        raise DataError(f"{path} ends inside its header, after {len(content)} bytes; fetch the file again")
    dims = tuple(int.from_bytes(content[at : at + 4], "big") for at in range(4, header_bytes, 4))
    expected = header_bytes + math.prod(dims)
    if len(content) != expected:
        raise DataError(
            f"{path} has {len(content)} bytes but its header {'x'.join(map(str, dims))} needs {expected}; "
            "fetch the file again"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header_bytes).reshape(dims)


def _open(folder: Path, split: Split, name: str, num_classes: int | None) -> ImageArray:
    prefix = FILE_PREFIX[split]
    images = read_idx(_find(folder, f"{prefix}-images-idx3-ubyte"), num_dims=3)
    labels = read_idx(_find(folder, f"{prefix}-labels-idx1-ubyte"), num_dims=1)
    return ImageArray(name, images[..., None], labels, num_classes)


def _find(folder: Path, name: str) -> Path:
    if (path := path_of(folder, name)) is not None:
        return path
    raise DataError(f"{folder} has neither {name} nor {name}.gz; give the folder that holds the four idx files")
