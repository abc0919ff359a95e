"""Settings of the final collapse and of the collapsed ensemble (Codreanu 2017)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megabatch.config.section import Positive, Section
from megabatch.errors import ConfigError
from megabatch.schedule.pieces import Scheduled, check_pieces, largest_value


class CollapseConfig(Section):
    """Side branches that anneal the trunk's weights to a finished model, one member of an ensemble each.

    A branch starts from the trunk's weights at each of `at_epochs` and lasts `epochs`; the trunk then goes on from
    where the branch left it. The branch's schedules count epochs from its own start. What is left out is as on the
    trunk where the branch begins; lr then falls from there to 0 with power 2.
    `augment`: "plain" keeps crops and flips without changes of scale and shape, "off" leaves the images alone, "same"
    is what the trunk has. `global_batch_size` 0 is the batch the trunk has there.
    """

    at_epochs: Annotated[tuple[Positive, ...], Field(min_length=1)]  # of the trunk, where branches leave it
    epochs: Positive = 5.0  # length of a branch
    lr: Scheduled | None = None  # none: falls to 0 from where the trunk is
    weight_decay: Scheduled | None = None  # none: as on the trunk
    momentum: Scheduled | None = None  # none: as on the trunk
    reset_momentum: bool = True  # a branch begins with an empty optimizer
    augment: Literal["plain", "off", "same"] = "plain"  # plain: crops and flips without change of scale
    global_batch_size: Annotated[int, Field(ge=0)] = 0  # 0: that of the trunk

    @model_validator(mode="after")
    def _epochs_rise(self) -> CollapseConfig:
        if sorted(set(self.at_epochs)) != list(self.at_epochs):
            raise ValueError(
                f"collapse.at_epochs must rise, given {list(self.at_epochs)}; sort them and name each once"
            )
        for name in ("lr", "weight_decay", "momentum"):
            schedule = getattr(self, name)
            if isinstance(schedule, tuple):
                check_pieces(schedule, f"collapse.{name}")
        if self.momentum is not None and (largest := largest_value(self.momentum)) >= 1:
            raise ValueError(f"collapse.momentum {largest:g} never forgets and cannot be used; keep it below 1")
        return self

    def check_fits(self, train_epochs: float, ghost_batch_size: int) -> None:
        """Refuse branches that do not fit the run.

        Raises:
            ConfigError: what is given, what is needed, what to do.
        """
        if self.epochs > train_epochs:
            raise ConfigError(
                f"collapse.epochs {self.epochs:g} is longer than the run of train.epochs {train_epochs:g}; "
                "shorten the collapse or lengthen the run"
            )
        if self.at_epochs[-1] > train_epochs * (1 + 1e-9):  # epochs that were stretched may be off by rounding
            raise ConfigError(
                f"collapse.at_epochs has {self.at_epochs[-1]:g}, but the trunk ends at train.epochs {train_epochs:g}; "
                "a branch must leave the trunk at its end or before"
            )
        if self.global_batch_size % ghost_batch_size:
            raise ConfigError(
                f"collapse.global_batch_size {self.global_batch_size} is not a multiple of train.ghost_batch_size "
                f"{ghost_batch_size}; give a multiple, or 0 for the batch of the trunk"
            )
