"""A scheduled value as a list of pieces: a pure function of the fractional epoch.

Each piece runs from where the one before it ends to its own `until_epoch`, from `start` to `end`, along a shape:

    constant    start throughout (a step schedule is a list of constants)
    linear      start + (end - start) * x
    cosine      end + (start - end) * (1 + cos(pi * x)) / 2
    polynomial  end + (start - end) * (1 - x) ** power

with x the share of the piece that has passed. After the last piece its final value holds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["Piece", "Scheduled", "value_at"]

Shape = Literal["constant", "linear", "cosine", "polynomial"]


class Piece(BaseModel):
    """One stretch of a schedule; `end` defaults to `start`, which makes the piece constant."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    until_epoch: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    shape: Shape = "constant"
    start: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    end: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    power: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0

    @model_validator(mode="after")
    def _shape_fits(self) -> Piece:
        if self.shape == "constant" and self.end not in (None, self.start):
            raise ValueError("a constant piece takes no `end`; name a shape: linear, cosine or polynomial")
        if self.shape != "constant" and self.end is None:
            raise ValueError(f"a {self.shape} piece needs an `end`")
        return self

    def at(self, share: float) -> float:
        """The value when `share` of the piece (0 to 1) has passed."""
        end = self.start if self.end is None else self.end
        if self.shape == "linear":
            return self.start + (end - self.start) * share
        if self.shape == "cosine":
            return end + (self.start - end) * (1.0 + math.cos(math.pi * share)) / 2.0
        if self.shape == "polynomial":
            return float(end + (self.start - end) * (1.0 - share) ** self.power)
        return self.start


# A plain number is a schedule that never changes.
Scheduled = Annotated[float, Field(ge=0, allow_inf_nan=False)] | tuple[Piece, ...]


def value_at(schedule: float | tuple[Piece, ...], epoch: float) -> float:
    """The scheduled value at a fractional epoch; a joint belongs to the piece that begins there."""
    if not isinstance(schedule, tuple):
        return float(schedule)
    ends = [piece.until_epoch for piece in schedule]
    index = bisect_right(ends, epoch)
    if index == len(schedule):
        return schedule[-1].at(1.0)
    begin = ends[index - 1] if index else 0.0
    return schedule[index].at((epoch - begin) / (ends[index] - begin))
