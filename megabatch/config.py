"""The settings of a run: typed, frozen, checked once, saved with the run.

`megabatch.recipes` reads them from a recipe file and applies overrides. A comment beside a field says what a special
value does.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, model_validator

from megabatch.schedule.batch import parse_stages
from megabatch.schedule.pieces import Scheduled, value_at

__all__ = [
    "AugmentConfig",
    "CheckpointConfig",
    "CommConfig",
    "Config",
    "DataConfig",
    "GeneratedConfig",
    "ModelConfig",
    "NormConfig",
    "OptimizerConfig",
    "Promise",
    "TrainConfig",
    "differences",
]

PositiveInt = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Promise(Section):
    """What the recipe claims and where the claim comes from; the head of every recipe."""

    paper: str
    hardware: str
    time: str
    accuracy: str
    command: str = ""
    unknown: tuple[str, ...] = ()


class AugmentConfig(Section):
    """Random changes of a training picture, keyed by (seed, epoch, sample)."""

    crop: Literal["none", "pad", "resized"] = "none"
    padding: Annotated[int, Field(ge=0)] = 0
    flip: bool = False
    area_min: Annotated[float, Field(gt=0, le=1)] = 0.08
    area_max: Annotated[float, Field(gt=0, le=1)] = 1.0
    aspect_min: Annotated[float, Field(gt=0)] = 3 / 4
    aspect_max: Annotated[float, Field(gt=0)] = 4 / 3


class GeneratedConfig(Section):
    """The size of the generated set, for machines without data."""

    num_train: PositiveInt = 20_000
    num_val: PositiveInt = 2_000
    num_classes: Annotated[int, Field(ge=2)] = 10
    channels: Literal[1, 3] = 3


class DataConfig(Section):
    """Where the pictures come from."""

    source: str = "generated"
    path: str = ""
    num_classes: Annotated[int, Field(ge=2)] | None = None  # None: what the labels or the folders show
    image_size: Annotated[int, Field(ge=8)] = 224
    mean: tuple[NotNegative, ...] = (0.485, 0.456, 0.406)
    std: tuple[Annotated[float, Field(gt=0)], ...] = (0.229, 0.224, 0.225)
    prefetch_ghosts: PositiveInt = 4
    augment: AugmentConfig = AugmentConfig()
    generated: GeneratedConfig = GeneratedConfig()

    @model_validator(mode="after")
    def _mean_and_std_pair_up(self) -> DataConfig:
        if len(self.mean) != len(self.std) or not self.mean:
            raise ValueError(
                f"data.mean has {len(self.mean)} values and data.std {len(self.std)}; give as many of each"
            )
        return self


class ModelConfig(Section):
    """The network: a built-in name, `timm:NAME` or `package.module:function`."""

    name: str = "resnet50"
    zero_gamma: Literal["none", "every_block", "last_block_of_stage"] = "every_block"
    width: PositiveInt | None = None


class NormConfig(Section):
    """Batch-norm statistics used for evaluation.

    `newest_share` is the weight of the newest update in the running average (PyTorch calls it momentum; Codreanu's
    moving-average fraction 0.95 is 0.05 here). With 1.0 there is no moving average: the statistics of the last
    update's ghost batches alone are averaged over all workers (Akiba 2017, section 2).
    """

    newest_share: Annotated[float, Field(gt=0, le=1)] = 0.1


class OptimizerConfig(Section):
    """The update rule. A value is a number, or a list of pieces over epochs."""

    name: Literal["sgd"] = "sgd"
    learning_rate: Scheduled = 0.1
    momentum: Scheduled = 0.9
    nesterov: bool = False
    weight_decay: Scheduled = 1e-4
    decay_norm_and_bias: bool = False

    @model_validator(mode="after")
    def _pieces_rise(self) -> OptimizerConfig:
        for name in ("learning_rate", "momentum", "weight_decay"):
            pieces = getattr(self, name)
            if not isinstance(pieces, tuple):
                continue
            ends = [piece.until_epoch for piece in pieces]
            if not ends or sorted(set(ends)) != ends:
                raise ValueError(f"the pieces of optimizer.{name} must have rising until_epoch values, given {ends}")
        if self.nesterov and value_at(self.momentum, 0.0) == 0.0:
            raise ValueError("optimizer.nesterov needs optimizer.momentum above 0 from the start; set one or the other")
        return self


class TrainConfig(Section):
    """How much, how fast, how exactly."""

    batch_total: PositiveInt | str = 256
    ghost_batch: Annotated[int, Field(ge=2)] = 32
    epochs: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 90
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    max_updates: Annotated[int, Field(ge=0)] = 0  # 0: no limit
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    channels_last: bool = True
    compile: bool = False
    max_skipped_updates: Annotated[int, Field(ge=0)] = 10  # non-finite gradients in a row before the run stops
    evaluate_every_epochs: NotNegative = 1.0  # 0: only at the end
    evaluation_batch: PositiveInt = 250  # pictures per forward pass, per worker
    threads_per_worker: Annotated[int, Field(ge=0)] = 0  # 0: cores of the host / workers on it

    @model_validator(mode="after")
    def _ghosts_fit(self) -> TrainConfig:
        for total in parse_stages(self.batch_total).batch_totals:
            if total % self.ghost_batch:
                lower = total // self.ghost_batch * self.ghost_batch or self.ghost_batch
                raise ValueError(
                    f"train.batch_total {total} is not a multiple of train.ghost_batch {self.ghost_batch}; "
                    f"nearest that fit: {lower}, {lower + self.ghost_batch}"
                )
        return self


class CheckpointConfig(Section):
    """When checkpoints are written and how many are kept."""

    every_epochs: NotNegative = 1.0
    every_updates: Annotated[int, Field(ge=0)] = 0  # 0: not by updates
    keep: Annotated[int, Field(ge=2)] = 3


class CommConfig(Section):
    """How gradients travel between workers.

    `algorithm` is one of `megabatch.comm.phases`; "backend" is torch's own all-reduce, what plain DDP uses;
    "auto" measures the grid at the start and chooses by message size.
    `wire` is the precision of gradients on their way.
    """

    algorithm: Literal[
        "auto", "backend", "ring", "halving_doubling", "hierarchical", "torus", "two_way_torus", "direct", "exchange"
    ] = "backend"
    wire: Literal["fp32", "fp16", "bf16"] = "fp32"
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    bucket_mb: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 25.0
    timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    max_restarts: Annotated[int, Field(ge=0)] = 3


class Config(Section):
    """One run, whole."""

    promise: Promise
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    norm: NormConfig = NormConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    comm: CommConfig = CommConfig()

    def to_toml(self) -> str:
        """The resolved settings as a recipe that reads back equal."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


def differences(one: Config, other: Config) -> dict[str, tuple[Any, Any]]:
    """The dotted names whose values differ, with both values."""
    left, right = _flatten(one.model_dump(mode="json")), _flatten(other.model_dump(mode="json"))
    return {
        key: (left.get(key), right.get(key))
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key)
    }


def _flatten(table: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(table, dict):
        return {prefix: table}
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat.update(_flatten(value, f"{prefix}.{key}" if prefix else key))
    return flat
