"""Batch-size control: one object says what each step of a loop is.

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
the middle of an epoch and a resumed loop goes on inside any stage. A rank for which a step has no ghost batch of its
own is idle (`step.is_idle`): `ghosts` holds one batch of another rank and `loss_weight` is zero, so that the loop above
makes the synchronised pass that the others wait for.

The batch may also follow a measurement: give an `AdaptiveBatch` instead of stages, and tell it about every step with
`observe`. `megabatch train` takes its steps from here too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from megabatch.errors import ConfigError
from megabatch.schedule.adaptive import AdaptiveBatch
from megabatch.schedule.batch import Step, check_whole_ghosts, first_sample, iterate_steps, parse_stages
from megabatch.schedule.noise import NoiseRule

__all__ = ["BatchControl"]


class BatchControl:
    """Iterates over the steps of a run from where it stands; a new iteration continues, it does not start over.

    global_batch_size: a number, stages such as "0:4096 30:8192", or an `AdaptiveBatch`.
    noise_rule: what a growing batch does to the noise scale.
    until_epoch: leave out the steps that start there or later. max_steps: stop after so many; 0 is no limit.

    Raises:
        ConfigError: stages that cannot be read, do not rise or are not whole ghost batches; a rank outside the world;
            fewer images than a ghost batch.
    """

    def __init__(
        self,
        global_batch_size: int | str | AdaptiveBatch,
        *,
        ghost_batch_size: int,
        samples_per_epoch: int,
        epochs: float,
        rank: int = 0,
        world_size: int = 1,
        noise_rule: NoiseRule = "falls",
        until_epoch: float = math.inf,
        max_steps: int = 0,
    ) -> None:
        self.adaptive: AdaptiveBatch | None = None
        if isinstance(global_batch_size, AdaptiveBatch):
            self.adaptive, global_batch_size = global_batch_size, global_batch_size.first_global_batch_size
            self.adaptive.reopen()
        self.stages = parse_stages(global_batch_size)
        check_whole_ghosts(self.stages, ghost_batch_size)
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} of {world_size} ranks; ranks are 0 to {world_size - 1}")
        self.ghost_batch_size, self.samples_per_epoch = ghost_batch_size, samples_per_epoch
        self.total_samples = round(epochs * samples_per_epoch)
        if self.total_samples < ghost_batch_size:
            raise ConfigError(
                f"{epochs:g} epochs of {samples_per_epoch} images are fewer than a ghost batch of {ghost_batch_size}; "
                "give more epochs, more images or a smaller ghost_batch_size"
            )
        self.rank, self.world_size, self.noise_rule = rank, world_size, noise_rule
        self.until_samples, self.max_steps = first_sample(until_epoch, samples_per_epoch), max_steps
        self.samples = 0
        self.steps = 0

    @property
    def epoch(self) -> float:
        return self.samples / self.samples_per_epoch

    def is_over(self, samples: int) -> bool:
        """Whether no step is left after so many samples; `max_steps` is not asked."""
        return samples >= self.until_samples or self.total_samples - samples < self.ghost_batch_size

    def __iter__(self) -> Iterator[Step]:
        if self.max_steps and self.steps >= self.max_steps:
            return
        steps = iterate_steps(
            _measured_batches(self.adaptive) if self.adaptive else self.stages.at,
            self.ghost_batch_size,
            self.samples_per_epoch,
            self.total_samples,
            start_samples=self.samples,
            start_index=self.steps,
            until_samples=self.until_samples,
        )
        for step in steps:
            self.samples, self.steps = step.end_samples, step.index + 1
            is_limit = self.steps == self.max_steps
            yield replace(
                step,
                growth=step.stage_batch_size / self.stages.global_batch_sizes[0],
                noise_rule=self.noise_rule,
                is_last=is_limit or self.is_over(step.end_samples),
                rank=self.rank,
                world_size=self.world_size,
            )
            if is_limit:
                return

    def close(self) -> None:
        """Let nobody wait for a measurement any longer: the iteration ends."""
        if self.adaptive:
            self.adaptive.close()

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, the step being iterated over included: take it after `optimizer.step()`."""
        state = {"samples": self.samples, "steps": self.steps, "samples_per_epoch": self.samples_per_epoch}
        return state | ({"adaptive": self.adaptive.state_dict()} if self.adaptive else {})

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
        if self.adaptive and "adaptive" in state:
            self.adaptive.load_state_dict(state["adaptive"])


def _measured_batches(adaptive: AdaptiveBatch) -> Callable[[float], int]:
    """The batches of the steps to come, one after the other."""
    numbers = itertools.count(adaptive.observed)
    return lambda _epoch: adaptive.wait_for(next(numbers))
