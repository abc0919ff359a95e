"""What sources of encoded images share: the bytes are handed out, so that a decoder may decode only a part of
them."""

from __future__ import annotations

import abc
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from megabatch.data.decode import decode_image

__all__ = ["EncodedImages", "HasBytes"]


@runtime_checkable
class HasBytes(Protocol):
    """A source that can hand out its images as they are stored: JPEG, PNG or WebP."""

    def read_bytes(self, index: int) -> bytes: ...

    def name_of(self, index: int) -> str: ...


class EncodedImages(abc.ABC):
    """A source that knows where the bytes are; decoding them is the same for all kinds."""

    channels: int

    @abc.abstractmethod
    def read_bytes(self, index: int) -> bytes:
        """The encoded image; DataError naming it when it cannot be had."""

    @abc.abstractmethod
    def name_of(self, index: int) -> str:
        """Which image it is, for people: a path, or a member and its shard."""

    def read(self, index: int) -> NDArray[np.uint8]:
        """The decoded image, [height, width, channels]; DataError naming it when it is unreadable."""
        return decode_image(self.read_bytes(index), self.channels, lambda: self.name_of(index))
