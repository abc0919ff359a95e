"""The settings of a run: typed, frozen, checked once, saved with the run. One file per section.

`megabatch.recipes` reads them from a recipe file and applies overrides. A comment beside a field says what a special
value does.
"""

from __future__ import annotations

from typing import Any

import tomli_w
from pydantic import model_validator

from megabatch.config.batch_control import BatchControlConfig
from megabatch.config.collapse import CollapseConfig
from megabatch.config.comm import MAX_EXACT_GHOSTS, CommConfig
from megabatch.config.data import DataConfig
from megabatch.config.model import ModelConfig, NormConfig
from megabatch.config.optimizer import OptimizerConfig
from megabatch.config.section import Reference, Section
from megabatch.config.train import CheckpointConfig, LogConfig, TrainConfig
from megabatch.errors import ConfigError
from megabatch.files import flatten
from megabatch.schedule.batch import parse_stages
from megabatch.schedule.noise import noise_keeping_momentum
from megabatch.schedule.pieces import smallest_value

__all__ = ["CommConfig", "Config", "OptimizerConfig", "TrainConfig", "differences"]


class Config(Section):
    """One run, whole."""

    reference: Reference = Reference()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    norm: NormConfig = NormConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    comm: CommConfig = CommConfig()
    log: LogConfig = LogConfig()
    batch_control: BatchControlConfig = BatchControlConfig()
    collapse: CollapseConfig | None = None

    @model_validator(mode="after")
    def _sections_fit(self) -> Config:
        train, totals = self.train, parse_stages(self.train.global_batch_size).global_batch_sizes
        self.batch_control.check_fits(totals[0], len(totals), train.ghost_batch_size)
        if self.batch_control.noise_rule == "momentum":  # refused here rather than when the stage is reached
            noise_keeping_momentum(smallest_value(self.optimizer.momentum), min(totals) / totals[0])
        if train.cuda_graph and (self.data.augment.mixup or self.data.augment.cutmix):
            raise ConfigError("train.cuda_graph was not made for data.augment.mixup and cutmix; leave one of them out")
        if train.audit_every_steps and self.comm.sums != "exact":
            raise ConfigError(
                f"train.audit_every_steps {train.audit_every_steps} compares integers, comm.sums is "
                f"'{self.comm.sums}'; set comm.sums=exact, or train.audit_every_steps=0"
            )
        adaptive, collapse = self.batch_control.adaptive, self.collapse
        totals = (*totals, *([adaptive.max_global_batch_size] if adaptive else []))
        totals = (*totals, *([collapse.global_batch_size] if collapse and collapse.global_batch_size else []))
        num_ghosts = max(totals) // train.ghost_batch_size
        if self.comm.sums == "exact" and num_ghosts > MAX_EXACT_GHOSTS:
            raise ConfigError(
                f"a step of {num_ghosts:,} ghost batches; exact sums hold at most {MAX_EXACT_GHOSTS:,}: make "
                "train.ghost_batch_size larger, or set comm.sums=float"
            )
        if self.collapse is not None:
            self.collapse.check_fits(train.epochs, train.ghost_batch_size)
        return self

    def to_toml(self) -> str:
        """The resolved settings as a recipe that reads back equal."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


def differences(one: Config, other: Config) -> dict[str, tuple[Any, Any]]:
    """The dotted names whose values differ, with both values."""
    left, right = (dict(flatten(config.model_dump(mode="json"))) for config in (one, other))
    return {
        key: (left.get(key), right.get(key))
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key)
    }
