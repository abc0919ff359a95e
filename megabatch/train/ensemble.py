"""What becomes of a run's members besides averaging their probabilities: one network with their average weights.

Codreanu 2017 averages probabilities, at the price of one forward pass per member. Averaging weights costs one pass, but
is only as good as the straight line between the members is flat; `megabatch evaluate --ensemble` shows both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabatch.config import Config
from megabatch.data.augment import Augmentation
from megabatch.data.batches import assemble_training
from megabatch.data.randomness import stream
from megabatch.data.sources import Source
from megabatch.model.norm import exact_statistics
from megabatch.schedule.batch import shard_range
from megabatch.train.segment import branch_augment

__all__ = ["average_weights", "re_estimate_statistics"]

GHOSTS_FOR_STATISTICS = 32  # when the recipe itself does not say


def average_weights(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of every floating-point tensor, taken in float64; of counters the newest."""
    averaged: dict[str, Tensor] = {}
    for name, newest in states[-1].items():
        if newest.is_floating_point():
            averaged[name] = torch.stack([state[name].double() for state in states]).mean(dim=0).to(newest.dtype)
        else:
            averaged[name] = newest.clone()
    return averaged


def re_estimate_statistics(
    network: nn.Module,
    config: Config,
    source: Source,
    normalise: Callable[[Tensor], Tensor],
    autocast: Callable[[], torch.autocast],
) -> int:
    """Give the network exact statistics over training images, as its members last saw them.

    They are the first ghost batches of the run's stream, dealt over all workers; returns how many.
    """
    num_ghosts = config.norm.exact_batches or GHOSTS_FOR_STATISTICS
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    augmentation = Augmentation(**branch_augment(config).model_dump())
    seed, ghost_batch_size = config.train.seed, config.train.ghost_batch_size

    def ghosts() -> Iterator[Tensor]:
        for index in shard_range(num_ghosts, world_size, rank):
            epochs, samples = stream(seed, len(source), index * ghost_batch_size, ghost_batch_size)
            size, tolerant = config.data.image_size, config.data.max_broken_share > 0
            images, _ = assemble_training(source, augmentation, size, seed, epochs, samples, tolerant=tolerant)
            yield normalise(torch.from_numpy(images))

    with autocast():
        exact_statistics(network, ghosts(), 1.0 / num_ghosts, config.norm.variance)
    return num_ghosts
