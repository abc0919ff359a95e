"""What every section of the settings is made of, and the head of every recipe: what it claims and why."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["NotNegative", "PositiveInt", "Reference", "Section", "Share"]

PositiveInt = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    """Frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


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
