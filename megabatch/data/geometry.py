"""Boxes: which part of an image is wanted, and how much of it a decoder may leave out."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Box", "FloatBox", "Reduction", "reduction_for"]

Box = tuple[int, int, int, int]  # left, top, right, bottom, in pixels, as Pillow has it
FloatBox = tuple[float, float, float, float]

DENOMINATORS = (8, 4, 2)


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
