"""Batch-size control in a loop of your own: one object says what each update is.

    control = BatchControl("0:4096 30:8192", ghost_batch=32, samples_per_epoch=50_000, epochs=90, rank=3, world_size=8)
    for step in control:
        for group in optimizer.param_groups:
            group["lr"], group["momentum"] = step.keep_noise(rate(step.epoch), 0.9)
        for positions in step.ghosts:                       # this rank's ghost batches, positions of the global stream
            pictures, labels = load(positions)
            with nullcontext() if positions is step.ghosts[-1] else ddp.no_sync():
                loss(ddp(pictures), labels, reduction="sum").mul(step.loss_weight).backward()
        optimizer.step()
        ...                                                 # control.state_dict() here counts this update as done

Every rank asks for itself and all get the same updates. Pictures are counted, not batches, so the batch may change in
the middle of an epoch and a resumed loop goes on inside any stage. `ghosts` is empty on a rank for which an update has
no ghost batch: such a rank must still make one synchronised backward pass, of weight zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from megabatch.errors import ConfigError
from megabatch.schedule.batch import Update, check_whole_ghosts, deal, iterate_updates, parse_stages
from megabatch.schedule.noise import noise_keeping_momentum, noise_keeping_rate

__all__ = ["BatchControl", "BatchStep", "NoiseRule", "keep_noise"]

# What happens to Smith's noise scale when the batch grows: it falls, or the rate or the momentum keeps it.
NoiseRule = Literal["falls", "rate", "momentum"]


def keep_noise(rule: NoiseRule, rate: float, momentum: float, growth: float) -> tuple[float, float]:
    """Rate and momentum for a batch that is `growth` times the first stage's (see `megabatch.schedule.noise`)."""
    if rule == "rate":
        return noise_keeping_rate(rate, growth), momentum
    if rule == "momentum":
        return rate, noise_keeping_momentum(momentum, growth)
    return rate, momentum


@dataclass(frozen=True)
class BatchStep:
    """One update as one rank sees it."""

    update: Update
    ghosts: tuple[range, ...]  # this rank's ghost batches, as positions of the stream of all epochs laid end to end
    world_size: int
    growth: float  # this update's stage over the first stage
    noise: NoiseRule
    is_last: bool

    @property
    def batch_total(self) -> int:
        return self.update.num_samples

    @property
    def batch_on_rank(self) -> int:
        return sum(map(len, self.ghosts))

    @property
    def accumulation_steps(self) -> int:
        return len(self.ghosts)

    @property
    def epoch(self) -> float:
        return self.update.start_epoch

    @property
    def loss_weight(self) -> float:
        """Times a ghost batch's summed loss: DDP's average over ranks then is the mean over the update's pictures."""
        return self.world_size / self.update.num_samples

    def keep_noise(self, rate: float, momentum: float) -> tuple[float, float]:
        """Rate and momentum of this update, by the chosen rule."""
        return keep_noise(self.noise, rate, momentum, self.growth)


class BatchControl:
    """Iterates over the updates of a run from where it stands; a new iteration continues, it does not start over.

    batch_total: a number or stages such as "0:4096 30:8192". noise: what a growing batch does to the noise scale.

    Raises:
        ConfigError: stages that cannot be read, do not rise or are not whole ghost batches; a rank outside the world;
            fewer pictures than a ghost batch.
    """

    def __init__(
        self,
        batch_total: int | str,
        *,
        ghost_batch: int,
        samples_per_epoch: int,
        epochs: float,
        rank: int = 0,
        world_size: int = 1,
        noise: NoiseRule = "falls",
    ) -> None:
        self.stages = parse_stages(batch_total)
        check_whole_ghosts(self.stages, ghost_batch)
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} of {world_size} ranks; ranks are 0 to {world_size - 1}")
        self.ghost_batch = ghost_batch
        self.samples_per_epoch = samples_per_epoch
        self.total_samples = round(epochs * samples_per_epoch)
        if self.total_samples < ghost_batch:
            raise ConfigError(
                f"{epochs:g} epochs of {samples_per_epoch} pictures are fewer than a ghost batch of {ghost_batch}; "
                "give more epochs, more pictures or a smaller ghost_batch"
            )
        self.rank, self.world_size, self.noise = rank, world_size, noise
        self.samples = 0
        self.updates = 0

    @property
    def epoch(self) -> float:
        return self.samples / self.samples_per_epoch

    def __iter__(self) -> Iterator[BatchStep]:
        updates = iterate_updates(
            self.stages.at,
            self.ghost_batch,
            self.samples_per_epoch,
            self.total_samples,
            start_samples=self.samples,
            start_index=self.updates,
        )
        for update in updates:
            self.samples, self.updates = update.end_samples, update.index + 1
            mine = deal(update.num_ghosts, self.world_size, self.rank)
            starts = [update.start_samples + ghost * self.ghost_batch for ghost in mine]
            yield BatchStep(
                update=update,
                ghosts=tuple(range(start, start + self.ghost_batch) for start in starts),
                world_size=self.world_size,
                growth=self.stages.at(update.start_epoch) / self.stages.batch_totals[0],
                noise=self.noise,
                is_last=self.total_samples - update.end_samples < self.ghost_batch,
            )

    def state_dict(self) -> dict[str, int]:
        """Where the run stands, the update being iterated over included: take it after `optimizer.step()`."""
        return {"samples": self.samples, "updates": self.updates, "samples_per_epoch": self.samples_per_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, on any number of ranks.

        Raises:
            ConfigError: when the state belongs to a set of another size.
        """
        if state["samples_per_epoch"] != self.samples_per_epoch:
            raise ConfigError(
                f"the state counts {state['samples_per_epoch']} pictures an epoch, this run has "
                f"{self.samples_per_epoch}; give the data of that run"
            )
        self.samples, self.updates = int(state["samples"]), int(state["updates"])
