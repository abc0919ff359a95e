"""What a JPEG says about itself before its pixels, and how much of it a decoder may leave out.

Size, components and orientation are read without decoding anything. A decoder that is told the wanted box may reduce
the image by 2, 4 or 8 while it decodes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]  # an image is [height, width, channels]
Box = tuple[int, int, int, int]  # left, top, right, bottom, in pixels, as Pillow has it
FloatBox = tuple[float, float, float, float]

DENOMINATORS = (8, 4, 2)

_FRAMES = frozenset({0xC0, 0xC1, 0xC2})  # baseline, extended, progressive; the rest is not for libjpeg as we use it
_OTHER_FRAMES = frozenset(range(0xC3, 0xD0)) - {0xC4, 0xC8, 0xCC}
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD9)})
_ORIENTATION = 0x0112


class JpegHeader(NamedTuple):
    height: int
    width: int
    num_components: int
    upright: bool  # no note (EXIF, or XMP of whatever content) asks to turn the image
    whole: bool  # the file ends with the end mark


def read_jpeg_header(encoded: bytes) -> JpegHeader | None:
    """The header of a JPEG image of 8 bits a sample; None for other kinds and for anything out of the ordinary."""
    if encoded[:2] != b"\xff\xd8":
        return None
    at, end, upright = 2, len(encoded), True
    while at + 4 <= end:
        if encoded[at] != 0xFF:
            return None
        marker = encoded[at + 1]
        if marker == 0xFF:  # filling before a marker
            at += 1
            continue
        if marker in _WITHOUT_LENGTH:
            at += 2
            continue
        length = encoded[at + 2] << 8 | encoded[at + 3]
        if length < 2 or marker in _OTHER_FRAMES or marker in (0xD9, 0xDA):
            return None
        if marker in _FRAMES:
            if length < 8 or at + 10 > end or encoded[at + 4] != 8:
                return None
            height, width = encoded[at + 5] << 8 | encoded[at + 6], encoded[at + 7] << 8 | encoded[at + 8]
            if not height or not width:
                return None
            whole = encoded.endswith(b"\xff\xd9") or encoded.rstrip(b"\0").endswith(b"\xff\xd9")
            return JpegHeader(height, width, encoded[at + 9], upright, whole)
        if marker == 0xE1:
            upright = upright and _leaves_upright(encoded[at + 4 : at + 2 + length])
        at += 2 + length
    return None


class Reduction(NamedTuple):
    """A box in an image that is decoded at 1 / denominator of its size.

    `region` holds the whole pixels of the reduced image that the box touches, `box` is the box within that region.
    """

    denominator: int
    region: Box
    box: FloatBox


def reduction_for(box: Box, height: int, width: int, may_reduce: bool = True) -> Reduction:
    """The strongest reduction by 2, 4 or 8 that leaves the box at least as large as the wanted height x width.

    JPEG decoders reduce while they decode: the inverse transform of a block gives 4x4, 2x2 or 1 pixel instead of 8x8.
    """
    left, top, right, bottom = box
    denominator = 1
    if may_reduce:
        fitting = (d for d in DENOMINATORS if (right - left) >= d * width and (bottom - top) >= d * height)
        denominator = next(fitting, 1)
    first_column, first_row = left // denominator, top // denominator
    region = (first_column, first_row, -(-right // denominator), -(-bottom // denominator))
    within = (
        left / denominator - first_column,
        top / denominator - first_row,
        right / denominator - first_column,
        bottom / denominator - first_row,
    )
    return Reduction(denominator, region, within)


def _leaves_upright(note: bytes) -> bool:
    """Whether an APP1 segment certainly does not ask to turn the image."""
    if note[:6] != b"Exif\0\0":
        return b"Orientation" not in note
    tiff = note[6:]
    order = {b"II": "little", b"MM": "big"}.get(tiff[:2])
    if order is None:
        return False

    def number(at: int, size: int) -> int:
        return int.from_bytes(tiff[at : at + size], "little" if order == "little" else "big")

    first = number(4, 4)
    for entry in range(first + 2, first + 2 + 12 * number(first, 2), 12):
        if entry + 12 > len(tiff):
            return False
        if number(entry, 2) == _ORIENTATION:
            return number(entry + 8, 2) in (0, 1)
    return True
