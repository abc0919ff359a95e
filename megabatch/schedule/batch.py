"""The global batch as a function of the epoch, and the steps that follow from it.

The stream of training images is the orders of epoch 0, 1, 2, ... laid end to end. Step u takes the next
`global_batch_size` images of that stream, so an epoch's last images share a step with the next epoch's first:
no step is ever a small one at a rate made for a large one, no image is left out of an epoch or seen twice in it,
and every ghost batch is whole. Only the very end of a run can be uneven: the last step is cut to whole ghost
batches, and fewer than `ghost_batch_size` images remain unused.

Batch-size control (Mikami 2018, section 3.1; Smith 2017) is a list of stages: `"0:34816 30:69632"` means 34,816
images a step from the start and 69,632 from epoch 30. A stage begins with the first step that starts at or
after its epoch.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from megabatch.errors import ConfigError
from megabatch.schedule.noise import NoiseRule, keep_noise

MAX_EPOCHS = 1e6
_MAX_BATCH = 2**48


@dataclass(frozen=True)
class BatchStages:
    """Global batch by epoch: `global_batch_sizes[i]` holds from `from_epochs[i]` on."""

    from_epochs: tuple[float, ...]
    global_batch_sizes: tuple[int, ...]

    def at(self, epoch: float) -> int:
        """The global batch of a step that starts at this epoch."""
        return self.global_batch_sizes[bisect_right(self.from_epochs, epoch) - 1]

    @property
    def text(self) -> int | str:
        """As `train.global_batch_size` is written: `parse_stages` reads back the very same stages."""
        if len(self.global_batch_sizes) == 1:
            return self.global_batch_sizes[0]
        return " ".join(f"{_exact(a)}:{b}" for a, b in zip(self.from_epochs, self.global_batch_sizes, strict=True))

    def stretched(self, factor: float) -> BatchStages:
        """The same stages in a run `factor` times as long.

        It is the multiplication by which `recipes.scale.stretched` moves every other epoch of a recipe. So what
        changes together still does, at the same step: nothing here is rounded.
        """
        return BatchStages(tuple(start * factor for start in self.from_epochs), self.global_batch_sizes)

    def __str__(self) -> str:
        if len(self.global_batch_sizes) == 1:
            return f"{self.global_batch_sizes[0]:,}"
        stages = zip(self.from_epochs, self.global_batch_sizes, strict=True)
        return ", ".join(f"{total:,} from epoch {start:g}" for start, total in stages)


def _exact(number: float) -> str:
    """The shortest text that reads back as the same number."""
    return f"{number:g}" if float(f"{number:g}") == number else repr(number)


def parse_stages(text: int | str) -> BatchStages:
    """Read `1024` or `"0:1024 2.5:2048"`.

    Raises:
        ConfigError: when the text is not such a list, the epochs do not rise from 0, or a batch is not positive.
    """
    if isinstance(text, int):
        text = f"0:{text}"
    stages: list[tuple[float, int]] = []
    for word in text.replace(",", " ").split():
        epoch_text, colon, batch_text = word.rpartition(":")
        try:
            stages.append((float(epoch_text) if colon else 0.0, int(batch_text)))
        except ValueError:
            raise ConfigError(
                f"global_batch_size stage '{word}' cannot be read; write EPOCH:BATCH, for example \"0:1024 30:2048\""
            ) from None
    epochs = tuple(epoch for epoch, _ in stages)
    totals = tuple(total for _, total in stages)
    if not stages or epochs[0] != 0 or epochs[-1] > MAX_EPOCHS or not all(a < b for a, b in pairwise(epochs)):
        raise ConfigError(
            f'global_batch_size "{text}" must begin at epoch 0 and rise by stages, for example "0:1024 30:2048"'
        )
    if min(totals) < 1:
        raise ConfigError(f"global_batch_size {min(totals)} is not a positive number of images; give at least one")
    if max(totals) > _MAX_BATCH:
        raise ConfigError(f"global_batch_size {max(totals)} is no number of images; give at most {_MAX_BATCH}")
    return BatchStages(epochs, totals)


def check_whole_ghosts(stages: BatchStages, ghost_batch_size: int, section: str = "") -> None:
    """Refuse a stage that is not made of whole ghost batches; `section`: of the recipe that says so, with its point.

    Raises:
        ConfigError: naming the batch and the nearest ones that fit.
    """
    for total in stages.global_batch_sizes:
        if total % ghost_batch_size:
            lower = total // ghost_batch_size * ghost_batch_size or ghost_batch_size
            raise ConfigError(
                f"{section}global_batch_size {total} is not a multiple of {section}ghost_batch_size "
                f"{ghost_batch_size}; nearest that fit: {lower}, {lower + ghost_batch_size}"
            )


@dataclass(frozen=True)
class Step:
    """One optimizer step as one rank sees it: images `start_samples` to `end_samples` of the stream."""

    index: int
    start_samples: int
    num_samples: int
    ghost_batch_size: int
    epoch: float  # where it starts
    stage_batch_size: int = 0  # the global batch of its stage; the last step of a run is cut to what is left
    growth: float = 1.0  # its stage over the first stage
    noise_rule: NoiseRule = "falls"  # what that does to the noise scale
    is_last: bool = False
    rank: int = 0
    world_size: int = 1

    @property
    def end_samples(self) -> int:
        return self.start_samples + self.num_samples

    @property
    def num_ghosts(self) -> int:
        """The ghost batches of all ranks."""
        return self.num_samples // self.ghost_batch_size

    @property
    def first_ghost(self) -> int:
        """The number of this rank's first ghost batch among those of the step."""
        return shard_range(self.num_ghosts, self.world_size, self.rank).start

    @property
    def is_idle(self) -> bool:
        """Whether the step has no ghost batch for this rank, which then goes along with one that does not count."""
        return not shard_range(self.num_ghosts, self.world_size, self.rank)

    @cached_property
    def ghosts(self) -> tuple[range, ...]:
        """This rank's ghost batches, as positions of the stream; never empty.

        Every rank must make a synchronised backward pass. An idle one makes it with the step's first ghost batch, and
        its `loss_weight` is 0.
        """
        size = self.ghost_batch_size
        mine = shard_range(self.num_ghosts, self.world_size, self.rank) or range(1)
        starts = [self.start_samples + ghost * size for ghost in mine]
        return tuple(range(start, start + size) for start in starts)

    @property
    def loss_weight(self) -> float:
        """Times a ghost batch's summed loss: DDP's average over ranks then is the mean over the step's images."""
        return 0.0 if self.is_idle else self.world_size / self.num_samples

    @property
    def ghost_weight(self) -> float:
        """The share of one ghost batch of this rank in the step's gradient."""
        return 0.0 if self.is_idle else self.ghost_batch_size / self.num_samples

    def keep_noise(self, lr: float, momentum: float) -> tuple[float, float]:
        """The lr and momentum of this step, by the chosen rule."""
        return keep_noise(self.noise_rule, lr, momentum, self.growth)


def iterate_steps(
    global_batch_size_at: Callable[[float], int],
    ghost_batch_size: int,
    samples_per_epoch: int,
    total_samples: int,
    *,
    start_samples: int = 0,
    start_index: int = 0,
    until_samples: int = sys.maxsize,
) -> Iterator[Step]:
    """Yield the steps that start before `until_samples`, from `start_samples` to the end of the run.

    `global_batch_size_at` is asked once per step, in order, and may end the iteration by answering 0.
    """
    samples, index = start_samples, start_index
    while samples < until_samples:
        usable = (total_samples - samples) // ghost_batch_size * ghost_batch_size
        if usable <= 0:
            return
        epoch = samples / samples_per_epoch
        global_batch_size = global_batch_size_at(epoch)
        if global_batch_size <= 0:
            return
        num_samples = min(global_batch_size, usable)
        yield Step(index, samples, num_samples, ghost_batch_size, epoch, global_batch_size)
        samples += num_samples
        index += 1


def count_steps(stages: BatchStages, ghost_batch_size: int, samples_per_epoch: int, total_samples: int) -> int:
    """How many steps the whole run makes, without walking through them one by one."""
    samples = steps = 0
    bounds = [*(first_sample(epoch, samples_per_epoch) for epoch in stages.from_epochs[1:]), total_samples]
    for total, bound in zip(stages.global_batch_sizes, bounds, strict=True):
        usable = (total_samples - samples) // ghost_batch_size * ghost_batch_size
        if usable <= 0:
            break
        if bound >= samples + usable:
            return steps + -(-usable // total)
        # A stage lasts until the first step that starts at or after the next stage's epoch.
        in_stage = max(0, -(-(bound - samples) // total))
        steps += in_stage
        samples += in_stage * total
    return steps


def first_sample(epoch: float, samples_per_epoch: int) -> int:
    """The first stream position at or after `epoch`, decided by the same division as in `iterate_steps`."""
    if not math.isfinite(epoch):
        return sys.maxsize
    position = round(epoch * samples_per_epoch)
    while position / samples_per_epoch >= epoch:
        position -= 1
    while position / samples_per_epoch < epoch:
        position += 1
    return position


def shard_range(num_ghosts: int, world_size: int, rank: int) -> range:
    """This rank's shard of the ghost batches of a step: contiguous, and counts differ by one at most."""
    return range(num_ghosts * rank // world_size, num_ghosts * (rank + 1) // world_size)
