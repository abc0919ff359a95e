"""Settings of the training loop: how much, how fast, how exactly."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megabatch.config.section import NotNegative, PositiveInt, Section
from megabatch.schedule.batch import check_whole_ghosts, parse_stages

__all__ = ["TrainConfig"]


class TrainConfig(Section):
    """How much, how fast, how exactly."""

    global_batch_size: PositiveInt | str = 256
    ghost_batch_size: Annotated[int, Field(ge=2)] = 32
    epochs: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 90
    reset_momentum_at_epochs: tuple[float, ...] = ()  # the optimizer's state is cleared there
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    max_steps: Annotated[int, Field(ge=0)] = 0  # 0: no limit
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    channels_last: bool = True
    compile: bool = False
    max_skipped_steps: Annotated[int, Field(ge=0)] = 10  # non-finite gradients in a row before the run stops
    evaluate_every_epochs: NotNegative = 1.0  # 0: only at the end
    evaluation_batch_size: PositiveInt = 250  # images per forward pass, per worker
    threads_per_worker: Annotated[int, Field(ge=0)] = 0  # 0: cores of the host / workers on it

    @model_validator(mode="after")
    def _batches_and_epochs_fit(self) -> TrainConfig:
        check_whole_ghosts(parse_stages(self.global_batch_size), self.ghost_batch_size)
        given = self.reset_momentum_at_epochs
        if sorted(set(given)) != list(given) or any(not 0 < epoch < self.epochs for epoch in given):
            raise ValueError(
                f"train.reset_momentum_at_epochs must rise and lie between 0 and train.epochs {self.epochs:g}, "
                f"given {list(given)}"
            )
        return self
