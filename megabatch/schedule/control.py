"""Batch-size control in a loop of your own: one object says what each step is.

    control = BatchControl("0:4096 30:8192", ghost_batch_size=32, samples_per_epoch=50_000, epochs=90)
    for step in control:
        for group in optimizer.param_groups:
            group["lr"], group["momentum"] = step.keep_noise(lr(step.epoch), 0.9)
        for positions in step.ghosts:                       # this rank's ghost batches, positions of the global stream
            images, labels = load(positions)
            with nullcontext() if positions is step.ghosts[-1] else ddp.no_sync():
                loss(ddp(images), labels, reduction="sum").mul(step.loss_weight).backward()
        optimizer.step()
        ...                                                 # control.state_dict() here counts this step as done

Every rank asks for itself and all get the same steps. Images are counted, not batches, so the batch may change in
the middle of an epoch and a resumed loop goes on inside any stage. `ghosts` is empty on a rank for which a step has
no ghost batch: such a rank must still make one synchronised backward pass, of weight zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from megabatch.errors import ConfigError
from megabatch.schedule.batch import Step, check_whole_ghosts, iterate_steps, parse_stages, shard_range
from megabatch.schedule.noise import noise_keeping_lr, noise_keeping_momentum

__all__ = ["BatchControl", "BatchStep", "NoiseRule", "keep_noise"]

# What happens to Smith's noise scale when the batch grows: it falls, or the rate or the momentum keeps it.
NoiseRule = Literal["falls", "lr", "momentum"]


def keep_noise(rule: NoiseRule, lr: float, momentum: float, growth: float) -> tuple[float, float]:
    """Rate and momentum for a batch that is `growth` times the first stage's (see `megabatch.schedule.noise`)."""
    if rule == "lr":
        return noise_keeping_lr(lr, growth), momentum
    if rule == "momentum":
        return lr, noise_keeping_momentum(momentum, growth)
    return lr, momentum


@dataclass(frozen=True)
class BatchStep:
    """One step as one rank sees it."""

    step: Step
    ghosts: tuple[range, ...]  # this rank's ghost batches, as positions of the stream of all epochs laid end to end
    world_size: int
    growth: float  # this step's stage over the first stage
    noise: NoiseRule
    is_last: bool

    @property
    def global_batch_size(self) -> int:
        return self.step.num_samples

    @property
    def batch_on_rank(self) -> int:
        return sum(map(len, self.ghosts))

    @property
    def accumulation_steps(self) -> int:
        return len(self.ghosts)

    @property
    def epoch(self) -> float:
        return self.step.start_epoch

    @property
    def loss_weight(self) -> float:
        """Times a ghost batch's summed loss: DDP's average over ranks then is the mean over the step's images."""
        return self.world_size / self.step.num_samples

    def keep_noise(self, lr: float, momentum: float) -> tuple[float, float]:
        """Rate and momentum of this step, by the chosen rule."""
        return keep_noise(self.noise, lr, momentum, self.growth)


class BatchControl:
    """Iterates over the steps of a run from where it stands; a new iteration continues, it does not start over.

    global_batch_size: a number or stages such as "0:4096 30:8192". noise: what a growing batch does to the noise scale.

    Raises:
        ConfigError: stages that cannot be read, do not rise or are not whole ghost batches; a rank outside the world;
            fewer images than a ghost batch.
    """

    def __init__(
        self,
        global_batch_size: int | str,
        *,
        ghost_batch_size: int,
        samples_per_epoch: int,
        epochs: float,
        rank: int = 0,
        world_size: int = 1,
        noise: NoiseRule = "falls",
    ) -> None:
        self.stages = parse_stages(global_batch_size)
        check_whole_ghosts(self.stages, ghost_batch_size)
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} of {world_size} ranks; ranks are 0 to {world_size - 1}")
        self.ghost_batch_size = ghost_batch_size
        self.samples_per_epoch = samples_per_epoch
        self.total_samples = round(epochs * samples_per_epoch)
        if self.total_samples < ghost_batch_size:
            raise ConfigError(
                f"{epochs:g} epochs of {samples_per_epoch} images are fewer than a ghost batch of {ghost_batch_size}; "
                "give more epochs, more images or a smaller ghost_batch_size"
            )
        self.rank, self.world_size, self.noise = rank, world_size, noise
        self.samples = 0
        self.steps = 0

    @property
    def epoch(self) -> float:
        return self.samples / self.samples_per_epoch

    def __iter__(self) -> Iterator[BatchStep]:
        steps = iterate_steps(
            self.stages.at,
            self.ghost_batch_size,
            self.samples_per_epoch,
            self.total_samples,
            start_samples=self.samples,
            start_index=self.steps,
        )
        for step in steps:
            self.samples, self.steps = step.end_samples, step.index + 1
            mine = shard_range(step.num_ghosts, self.world_size, self.rank)
            starts = [step.start_samples + ghost * self.ghost_batch_size for ghost in mine]
            yield BatchStep(
                step=step,
                ghosts=tuple(range(start, start + self.ghost_batch_size) for start in starts),
                world_size=self.world_size,
                growth=self.stages.at(step.start_epoch) / self.stages.global_batch_sizes[0],
                noise=self.noise,
                is_last=self.total_samples - step.end_samples < self.ghost_batch_size,
            )

    def state_dict(self) -> dict[str, int]:
        """Where the run stands, the step being iterated over included: take it after `optimizer.step()`."""
        return {"samples": self.samples, "steps": self.steps, "samples_per_epoch": self.samples_per_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, on any number of ranks.

        Raises:
            ConfigError: when the state belongs to a set of another size.
        """
        if state["samples_per_epoch"] != self.samples_per_epoch:
            raise ConfigError(
                f"the state counts {state['samples_per_epoch']} images an epoch, this run has "
                f"{self.samples_per_epoch}; give the data of that run"
            )
        self.samples, self.steps = int(state["samples"]), int(state["steps"])
