"""Settings of the training loop: how much, how exactly, when it is saved, where its numbers go."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from megabatch.config.section import NotNegative, Positive, PositiveInt, Section
from megabatch.schedule.batch import MAX_EPOCHS, check_whole_ghosts, parse_stages


class TrainConfig(Section):
    """How much, how fast, how exactly."""

    global_batch_size: PositiveInt | str = 256  # images a step, or stages such as "0:1024 30:2048"
    ghost_batch_size: Annotated[int, Field(ge=2)] = 32  # images that share one batch-norm; it divides the global batch
    epochs: Annotated[Positive, Field(le=MAX_EPOCHS)] = 90  # passes over the training set; need not be whole
    reset_momentum_at_epochs: tuple[float, ...] = ()  # the optimizer's state is cleared there
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0  # of initial weights, sample order, augmentation and dropout
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0  # share of the target that all classes divide
    max_steps: Annotated[int, Field(ge=0)] = 0  # the run ends after so many; 0: no limit
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # of forward and backward passes; weights stay in fp32
    channels_last: bool = True  # memory order of images and weights: faster convolutions on most machines
    compile: bool = False  # the network by torch.compile
    cuda_graph: bool = False  # passes are captured in CUDA graphs; for CUDA devices and NCCL, not yet run on a device
    max_skipped_steps: Annotated[int, Field(ge=0)] = 10  # non-finite gradients in a row before the run stops
    evaluate_every_epochs: NotNegative = 1.0  # 0: only at the end
    evaluation_batch_size: PositiveInt = 250  # images per forward pass, per worker
    threads_per_worker: Annotated[int, Field(ge=0)] = 0  # 0: cores of the host / workers on it
    digest_every_steps: Annotated[int, Field(ge=0)] = 50  # of the weights, for `verify`; 0: only at checkpoints
    audit_every_steps: Annotated[int, Field(ge=0)] = 0  # a random ghost batch is computed again and compared; 0: never

    @model_validator(mode="after")
    def _batches_and_epochs_fit(self) -> TrainConfig:
        check_whole_ghosts(parse_stages(self.global_batch_size), self.ghost_batch_size, "train.")
        if self.compile and self.cuda_graph:
            raise ValueError("train.compile and train.cuda_graph were not made for each other; set one of them")
        given = self.reset_momentum_at_epochs
        if sorted(set(given)) != list(given) or any(not 0 < epoch < self.epochs for epoch in given):
            raise ValueError(
                f"train.reset_momentum_at_epochs must rise and lie between 0 and train.epochs {self.epochs:g}, "
                f"given {list(given)}"
            )
        return self


class CheckpointConfig(Section):
    """When checkpoints are written and how many are kept."""

    every_epochs: NotNegative = 1.0  # 0: not by epochs
    every_steps: Annotated[int, Field(ge=0)] = 0  # 0: not by steps
    keep: Annotated[int, Field(ge=2)] = 3  # the newest ones; the best is kept besides


Target = Literal["tensorboard", "wandb", "mlflow", "mllog"]


class LogConfig(Section):
    """`to` names the loggers. wandb and mlflow are extras: `pip install megabatch[wandb]`, `megabatch[mlflow]`.

    mllog writes MLPerf-style `:::MLLOG` lines to `mllog.log` in the run folder.
    """

    to: tuple[Target, ...] = ("tensorboard",)  # which loggers; none: an empty list
    project: str = "megabatch"  # the project (wandb) or experiment (mlflow) runs are filed under
    wandb_mode: Literal["offline", "online"] = "offline"  # offline: in the run folder, `wandb sync` sends it later
    mlflow_uri: str = ""  # empty: a file store in the folder `mlruns` of the run folder

    @field_validator("to")
    @classmethod
    def _each_once(cls, value: tuple[Target, ...]) -> tuple[Target, ...]:
        if len(set(value)) != len(value):
            raise ValueError(f"log.to names a logger twice, given {list(value)}; name each once")
        return value
