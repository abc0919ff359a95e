"""What every section of the settings is made of, and the head of every recipe: what it claims and why."""

from __future__ import annotations

import math
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(ge=1, le=2**48)]
Positive = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]


class Section(BaseModel):
    """Frozen, and unknown keys are refused. So are numbers that no machine word holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="after")
    def _numbers_fit(self) -> Self:
        for name, value in self:
            if isinstance(value, int | float) and 2**63 < abs(value) < math.inf:
                raise ValueError(f"'{name}' = {value:g} is too large; give a number below 2^63")
        return self


class Reference(Section):
    """What the recipe claims and where the claim comes from; the head of every recipe."""

    paper: str = "none"  # authors, year and title
    hardware: str = "any"  # what the paper trained on
    time: str = "not stated"  # how long that took
    accuracy: str = "not stated"  # what it reached
    workers: PositiveInt | None = None  # as published
    images: PositiveInt | None = None  # in the training set it was made for; `--scale` needs it
    command: str = ""  # how to repeat the run here
    unknown: tuple[str, ...] = ()  # what the paper does not say
