"""What the settings say about feeding a worker: lanes, decoder, broken images, and the size of training images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from megabatch.config import Config
from megabatch.data.batches import Feeding
from megabatch.data.broken_images import BrokenLog
from megabatch.data.decode import Decoding, check_decoder
from megabatch.data.sources import ImageArray, Source
from megabatch.machine import usable_cores
from megabatch.schedule.pieces import largest_value, value_at
from megabatch.train.world import World

__all__ = ["Feeds", "cores_of_worker", "feeding_of", "image_size_at", "largest_image_size"]

SIZE_STEP = 8
MOST_THREADS = 16


class Feeds:
    """The feeding of both sets of one run on one worker; broken images are counted over all its phases."""

    def __init__(self, config: Config, world: World, folder: Path, train: Source, val: Source) -> None:
        self.train = feeding_of(config, train, world.local_size, folder / f"broken.{world.rank}.jsonl")
        self.val = feeding_of(config, val, world.local_size, folder / f"broken.{world.rank}.jsonl")

    def total_broken(self, device: torch.device) -> int:
        """Broken images met by all workers, as often as they met them; every worker must call it."""
        here = float(self.train.broken.num_broken + self.val.broken.num_broken)
        total = torch.tensor(here, dtype=torch.float64, device=device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(total)
        return int(total.item())


def feeding_of(config: Config, source: Source, local_size: int, broken_list: Path | None = None) -> Feeding:
    """How the settings want this source read.

    Raises:
        ConfigError: a decoder that is not installed.
    """
    data = config.data
    check_decoder(data.decoder)
    threads = data.loader_threads or min(MOST_THREADS, cores_of_worker(local_size))
    return Feeding(
        threads=1 if isinstance(source, ImageArray) and not data.loader_threads else threads,
        processes=data.loader_processes,
        decoding=Decoding(data.decoder, data.reduce_jpeg),
        broken=BrokenLog(data.max_broken_share, broken_list, source.name),
    )


def cores_of_worker(local_size: int) -> int:
    """The host's cores shared among its workers, at least one."""
    return max(1, usable_cores() // local_size)


def image_size_at(config: Config) -> Callable[[float], int]:
    """The size of training images by epoch: the schedule rounded to whole multiples of 8, or always the same."""
    schedule = config.data.train_image_size
    if schedule is None:
        return lambda epoch: config.data.image_size
    return lambda epoch: max(SIZE_STEP, round(value_at(schedule, epoch) / SIZE_STEP) * SIZE_STEP)


def largest_image_size(config: Config) -> int:
    """The largest size that `image_size_at` gives."""
    schedule = config.data.train_image_size
    largest = config.data.image_size if schedule is None else round(largest_value(schedule) / SIZE_STEP) * SIZE_STEP
    return max(SIZE_STEP, largest)
