"""Settings of checkpoints."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megabatch.config.section import NotNegative, Section

__all__ = ["CheckpointConfig"]


class CheckpointConfig(Section):
    """When checkpoints are written and how many are kept."""

    every_epochs: NotNegative = 1.0
    every_steps: Annotated[int, Field(ge=0)] = 0  # 0: not by steps
    keep: Annotated[int, Field(ge=2)] = 3
