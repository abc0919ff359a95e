"""What every section of the settings is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["NotNegative", "PositiveInt", "Section", "Share"]


PositiveInt = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    """Frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
