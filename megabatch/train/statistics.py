"""Puts batch-norm statistics for evaluation into the network: running ones, or exact ones of the present weights.

Exact statistics (`norm.exact_batches = k`) come from forward passes over the k ghost batches that follow the clock in
the phase's own stream, with the phase's augmentation. Ghost batches are dealt to workers as in training and averaged
over all of them, so the result is the same on every worker and does not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megabatch.data.batches import assemble_training
from megabatch.data.randomness import stream
from megabatch.model.norm import exact_statistics
from megabatch.schedule.batch import shard_range
from megabatch.schedule.clock import Clock
from megabatch.train.build import Workbench
from megabatch.train.segment import Segment

__all__ = ["publish"]


def publish(bench: Workbench, segment: Segment, clock: Clock) -> None:
    """Give the network the statistics it is to be evaluated and saved with; every worker must call it."""
    bench.statistics.publish()
    if num_ghosts := bench.config.norm.exact_batches:
        with bench.autocast():
            ghosts = _ghosts(bench, segment, clock, num_ghosts)
            exact_statistics(bench.network, ghosts, 1.0 / num_ghosts, bench.config.norm.variance)


def _ghosts(bench: Workbench, segment: Segment, clock: Clock, num_ghosts: int) -> Iterator[Tensor]:
    """This worker's share of the ghost batches that follow the clock."""
    config, source = bench.config, bench.train_source
    size = config.train.ghost_batch_size
    for index in shard_range(num_ghosts, bench.world.size, bench.world.rank):
        epochs, samples = stream(segment.seed, len(source), clock.samples + index * size, size)
        images, _ = assemble_training(
            source,
            segment.augmentation,
            config.data.image_size,
            segment.seed,
            epochs,
            samples,
            tolerant=config.data.max_broken_share > 0,  # the loader counts them when their turn comes
        )
        yield bench.normalise(torch.from_numpy(images))
