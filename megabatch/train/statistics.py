"""Exact batch-norm statistics of present weights, over ghost batches of the training stream.

The ghost batches of one place of the stream are sharded over the ranks as in training and averaged over all of them:
the result is the same on every rank and does not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabatch.config import Config
from megabatch.config.data import AugmentConfig
from megabatch.data.augment import Augmentation
from megabatch.data.batches import assemble_training
from megabatch.data.randomness import stream
from megabatch.data.sources import Source
from megabatch.model.norm import exact_statistics
from megabatch.schedule.batch import shard_range

__all__ = ["measure_statistics"]


def measure_statistics(
    network: nn.Module,
    config: Config,
    source: Source,
    normalise: Callable[[Tensor], Tensor],
    *,
    num_ghosts: int,
    augment: AugmentConfig,
    seed: int,
    start_samples: int = 0,
) -> None:
    """Give the network the statistics of `num_ghosts` ghost batches from `start_samples` on; every rank must call it.

    Forward passes run in the precision of the caller's autocast.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    augmentation, size = Augmentation(**augment.model_dump()), config.train.ghost_batch_size
    tolerant = config.data.max_broken_share > 0  # the loader counts broken images when their turn comes

    def batches() -> Iterator[Tensor]:
        for index in shard_range(num_ghosts, world_size, rank):
            epochs, samples = stream(seed, len(source), start_samples + index * size, size)
            images, _ = assemble_training(
                source, augmentation, config.data.image_size, seed, epochs, samples, tolerant=tolerant
            )
            yield normalise(torch.from_numpy(images))

    exact_statistics(network, batches(), 1.0 / num_ghosts, config.norm.variance)
