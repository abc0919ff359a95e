"""Schedules of the papers in one call each, for a loop of your own.

    from megabatch import schedules

    lr = [*schedules.linear_warmup(to=4.8, epochs=5, start=0.1), *schedules.cosine(4.8, until_epoch=90)]
    ...
    group["lr"] = schedules.value_at(lr, epoch)          # epoch = images seen / images in the set

Each function returns a list of pieces; lists are joined with `*`. Momentum and weight decay are scheduled alike.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from megabatch.errors import ConfigError, complaint
from megabatch.schedule.pieces import Piece, value_at

__all__ = ["Piece", "constant", "cosine", "cycle", "linear_warmup", "polynomial", "slow_start", "steps", "value_at"]

# Akiba 2017, section 3.3: until epoch, factor of the linearly scaled rate.
_SLOW_START = ((40.0, 0.5), (70.0, 0.075), (85.0, 0.01), (90.0, 0.001))


def linear_warmup(to: float, epochs: float, start: float = 0.0) -> list[Piece]:
    """From `start` to `to` in the first `epochs` (gradual warm-up, Goyal 2017, section 2.2)."""
    return [_piece(until_epoch=epochs, shape="linear", start=start, end=to)]


def constant(value: float, until_epoch: float) -> list[Piece]:
    return [_piece(until_epoch=until_epoch, start=value)]


def steps(base: float, factors: Mapping[float, float], until_epoch: float) -> list[Piece]:
    """`base`, times a factor from each given epoch on: Goyal 2017 is {30: 0.1, 60: 0.01, 80: 0.001}."""
    values = [1.0, *factors.values()]
    ends = [*factors, until_epoch]
    return [_piece(until_epoch=end, start=base * value) for end, value in zip(ends, values, strict=True)]


def slow_start(base: float) -> list[Piece]:
    """Half the linearly scaled rate for 40 of 90 epochs, then 0.075, 0.01 and 0.001 of it (Akiba 2017, section 3.3)."""
    return [_piece(until_epoch=until, start=base * factor) for until, factor in _SLOW_START]


def polynomial(
    start: float,
    until_epoch: float,
    end: float = 0.0,
    power: float = 2.0,
    *,
    from_epoch: float | None = None,
    end_epoch: float | None = None,
) -> list[Piece]:
    """end + (start - end) * (1 - x) ** power; `from_epoch` 0 counts from the run's start, `end_epoch` cuts it."""
    return [
        _piece(
            until_epoch=until_epoch,
            shape="polynomial",
            start=start,
            end=end,
            power=power,
            from_epoch=from_epoch,
            end_epoch=end_epoch,
        )
    ]


def cosine(start: float, until_epoch: float, end: float = 0.0) -> list[Piece]:
    """Half a cosine from `start` to `end`, over the piece."""
    return [_piece(until_epoch=until_epoch, shape="cosine", start=start, end=end)]


def cycle(
    begin_epoch: float,
    epochs: float,
    base: float,
    zero_after_epochs: float,
    *,
    power: float = 2.0,
    warmup_epochs: float = 0.0,
    warmup_start: float = 0.0,
) -> list[Piece]:
    """One cycle of a cyclic schedule (Codreanu 2017): base * (1 - t / zero_after_epochs) ** power, cut after `epochs`.

    t counts from `begin_epoch`, also during the re-warm-up from `warmup_start` to `base`, so the value steps down where
    that ends. The next cycle begins at `begin_epoch + epochs`.
    """
    if zero_after_epochs < epochs or not 0.0 <= warmup_epochs < epochs:
        raise ConfigError(
            f"a cycle of {epochs:g} epochs has a curve of {zero_after_epochs:g} and a re-warm-up of {warmup_epochs:g}; "
            "the curve must not be shorter than the cycle, the re-warm-up must be"
        )
    warmup = []
    if warmup_epochs > 0:
        warmup = [_piece(until_epoch=begin_epoch + warmup_epochs, shape="linear", start=warmup_start, end=base)]
    return [
        *warmup,
        *polynomial(
            base, begin_epoch + epochs, power=power, from_epoch=begin_epoch, end_epoch=begin_epoch + zero_after_epochs
        ),
    ]


def _piece(**fields: object) -> Piece:
    try:
        return Piece.model_validate(fields)
    except ValidationError as error:
        given = ", ".join(f"{name} {value}" for name, value in fields.items() if value is not None)
        raise ConfigError(f"a schedule with {given} cannot be used: {complaint(error)[1]}") from None
