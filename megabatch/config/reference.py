"""The head of every recipe: what it claims and where the claim comes from."""

from __future__ import annotations

from megabatch.config.section import PositiveInt, Section

__all__ = ["Reference"]


class Reference(Section):
    """What the recipe claims and where the claim comes from; the head of every recipe."""

    paper: str
    hardware: str
    time: str
    accuracy: str
    workers: PositiveInt | None = None  # as published
    images: PositiveInt | None = None  # in the training set it was made for; `--scale` needs it
    command: str = ""
    unknown: tuple[str, ...] = ()
