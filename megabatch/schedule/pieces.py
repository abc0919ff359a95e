"""A scheduled value as a list of pieces: a pure function of the fractional epoch.

Each piece runs from where the one before it ends to its own `until_epoch`, from `start` to `end`, along a shape:

    constant    start throughout (a step schedule is a list of constants)
    linear      start + (end - start) * x
    cosine      end + (start - end) * (1 + cos(pi * x)) / 2
    polynomial  end + (start - end) * (1 - x) ** power

with x the share of the way that has passed. By default the way is the piece itself. `from_epoch` lets it begin earlier:
a decay "counted from the start of the run" has from_epoch = 0, and the value jumps where a warm-up hands over to it
(Codreanu 2017; MLPerf). `end_epoch` lets it end later: the curve is cut at `until_epoch` before it reaches `end`
(Codreanu's poly_cyc). After the last piece its final value holds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megabatch.errors import ConfigError

Shape = Literal["constant", "linear", "cosine", "polynomial"]


class Piece(BaseModel):
    """One stretch of a schedule; `end` defaults to `start`, which makes the piece constant."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    until_epoch: Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)]
    shape: Shape = "constant"
    start: Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]
    end: Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)] | None = None
    power: Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)] = 1.0
    from_epoch: Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)] | None = (
        None  # None: where the piece begins
    )
    end_epoch: Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)] | None = None  # None: until_epoch

    @model_validator(mode="after")
    def _shape_fits(self) -> Piece:
        if self.shape == "constant" and self.end not in (None, self.start):
            raise ValueError("a constant piece takes no `end`; name a shape: linear, cosine or polynomial")
        if self.shape != "constant" and self.end is None:
            raise ValueError(f"a {self.shape} piece needs an `end`")
        if self.end_epoch is not None and self.end_epoch < self.until_epoch:
            raise ValueError(
                f"a piece with end_epoch {self.end_epoch:g} reaches its end before until_epoch {self.until_epoch:g}; "
                "end_epoch must not be smaller"
            )
        return self

    def at(self, share: float) -> float:
        """The value when `share` of the way (0 to 1) has passed."""
        end = self.start if self.end is None else self.end
        if self.shape == "linear":
            return self.start + (end - self.start) * share
        if self.shape == "cosine":
            return end + (self.start - end) * (1.0 + math.cos(math.pi * share)) / 2.0
        if self.shape == "polynomial":
            return float(end + (self.start - end) * (1.0 - share) ** self.power)
        return self.start

    def at_epoch(self, epoch: float, begin_epoch: float) -> float:
        """The value at an epoch of a piece that begins at `begin_epoch`."""
        first = begin_epoch if self.from_epoch is None else self.from_epoch
        last = self.until_epoch if self.end_epoch is None else self.end_epoch
        return self.at((epoch - first) / (last - first))


# A plain number is a schedule that never changes.
Scheduled = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)] | tuple[Piece, ...]


def value_at(schedule: float | Sequence[Piece], epoch: float) -> float:
    """The scheduled value at a fractional epoch; a joint belongs to the piece that begins there.

    Raises:
        ConfigError: pieces that do not follow each other.
    """
    if not isinstance(schedule, Sequence):
        return float(schedule)
    check_pieces(schedule)
    ends = [piece.until_epoch for piece in schedule]
    index = min(bisect_right(ends, epoch), len(schedule) - 1)
    begin = ends[index - 1] if index else 0.0
    return schedule[index].at_epoch(min(epoch, ends[index]), begin)


def check_pieces(pieces: Sequence[Piece], name: str = "the schedule") -> None:
    """Refuse pieces out of order.

    Raises:
        ConfigError: no pieces, `until_epoch` values that do not rise, or a way that begins after its piece.
    """
    ends = [piece.until_epoch for piece in pieces]
    if not ends or any(one >= other for one, other in pairwise(ends)):
        raise ConfigError(f"the pieces of {name} must have rising until_epoch values, given {ends}")
    for piece, begin in zip(pieces, [0.0, *ends], strict=False):
        if piece.from_epoch is not None and piece.from_epoch > begin:
            raise ConfigError(
                f"the piece of {name} until epoch {piece.until_epoch:g} has from_epoch {piece.from_epoch:g} but begins "
                f"at epoch {begin:g}; from_epoch must not be larger"
            )


def largest_value(schedule: float | Sequence[Piece]) -> float:
    """The largest value a schedule may take: every shape stays between its ends."""
    if not isinstance(schedule, Sequence):
        return float(schedule)
    return max(max(piece.start, piece.end or 0.0) for piece in schedule)


def smallest_value(schedule: float | Sequence[Piece]) -> float:
    """The smallest value a schedule may take."""
    if not isinstance(schedule, Sequence):
        return float(schedule)
    return min(min(piece.start, piece.start if piece.end is None else piece.end) for piece in schedule)


def scaled(schedule: float | Sequence[Piece], factor: float) -> float | tuple[Piece, ...]:
    """The same shape at another level: every value times `factor`."""
    if not isinstance(schedule, Sequence):
        return float(schedule) * factor
    return tuple(
        piece.model_copy(update={"start": piece.start * factor, "end": _times(piece.end, factor)}) for piece in schedule
    )


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
