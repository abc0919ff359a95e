"""The images of a run: which sets it reads, how one rank prepares them, and how large they are at an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megabatch.config import Config
from megabatch.data.augment import Augmentation
from megabatch.data.batches import BrokenLog, LoaderSettings
from megabatch.data.decode import Decoding, check_decoder
from megabatch.data.formats import open_source
from megabatch.data.loader import GhostLoader
from megabatch.data.sources import ImageArray, Source, check_same_classes, downscale, limit_and_hold_out
from megabatch.data.verify import check_manifest
from megabatch.errors import DataError
from megabatch.machine import usable_cores
from megabatch.schedule.batch import Step
from megabatch.schedule.pieces import largest_value, value_at
from megabatch.train.phases import TrainingPhase

_ENCODED_LIMIT_BYTES = 64 * 2**20
_MAX_THREADS = 16
_SIZE_MULTIPLE = 8


def open_images(config: Config, *, to_train: bool = True) -> tuple[Source, Source]:
    """The training and the validation images, checked against each other; to_train: and against a ghost batch."""
    data = config.data
    options: dict[str, Any] = {"num_classes": data.num_classes} if data.num_classes else {}
    train_options: dict[str, Any] = {}
    val_options: dict[str, Any] = {}
    path = data.path or None
    if data.source == "generated":
        path = None
        made = data.generated
        options = {"image_size": data.image_size, "channels": made.channels, "num_classes": made.num_classes}
        options["seed"] = config.train.seed
        train_options, val_options = {"num_images": made.num_train}, {"num_images": made.num_val}
    elif data.max_train_images or data.held_out_images:
        train_options["memory_limit_bytes"] = _ENCODED_LIMIT_BYTES  # decode the chosen images only
    train = open_source(data.source, path, "train", **options, **train_options)
    val = open_source(data.source, path, "val", **options, **val_options)
    check_same_classes(train, val)
    if path is not None and "://" not in path:
        check_manifest(data.source, Path(path), "train", train)
        check_manifest(data.source, Path(path), "val", val)
    train, held_out = limit_and_hold_out(train, data.max_train_images, data.held_out_images)
    val = val if held_out is None else held_out
    if data.downscale:
        train, val = downscale(train, data.image_size), downscale(val, data.image_size)
    if to_train and len(train) < config.train.ghost_batch_size:
        raise DataError(
            f"the training set has {len(train)} images, one ghost batch needs {config.train.ghost_batch_size}; "
            "give more images or a smaller train.ghost_batch_size"
        )
    return train, val


class Feeds:
    """The feeding of both sets of one run on one rank; broken images are counted over all its phases."""

    def __init__(self, config: Config, local_size: int, broken_list: Path, train: Source, val: Source) -> None:
        self._config, self._train_source = config, train
        self.train = feeding_of(config, train, local_size, broken_list)
        self.val = feeding_of(config, val, local_size, broken_list)

    def open_loader(
        self, phase: TrainingPhase, steps: Iterable[Step], past_epochs: float, device: torch.device
    ) -> GhostLoader:
        """The ghost batches of a phase's steps, prepared ahead of time; `past_epochs` lie behind its epoch 0."""
        config, size_at = self._config, image_size_at(self._config)
        return GhostLoader(
            self._train_source,
            Augmentation(**phase.augment.model_dump()),
            lambda epoch: size_at(past_epochs + epoch),  # a branch does not go back to the small images of the start
            phase.seed,
            iter(steps),
            prefetch_ghosts=config.data.prefetch_ghosts,
            pin_for=device if device.type == "cuda" else None,
            feeding=self.train,
            largest_image_size=largest_image_size(config),
        )

    def total_broken(self, device: torch.device) -> int:
        """Broken images met by all ranks, as often as they met them; every rank must call it."""
        here = float(self.train.broken.num_broken + self.val.broken.num_broken)
        total = torch.tensor(here, dtype=torch.float64, device=device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(total)
        return int(total.item())


def feeding_of(config: Config, source: Source, local_size: int, broken_list: Path | None = None) -> LoaderSettings:
    """How the settings want this source read, on a host that `local_size` ranks share.

    Raises:
        ConfigError: a decoder that is not installed.
    """
    data = config.data
    check_decoder(data.decoder)
    default_threads = 1 if isinstance(source, ImageArray) else min(_MAX_THREADS, usable_cores(local_size))
    return LoaderSettings(
        threads=data.loader_threads or default_threads,
        processes=data.loader_processes,
        decoding=Decoding(data.decoder, data.reduce_jpeg),
        broken=BrokenLog(data.max_broken_share, broken_list, source.name),
    )


def image_size_at(config: Config) -> Callable[[float], int]:
    """The size of training images by epoch: the schedule rounded to whole multiples of 8, or always the same."""
    schedule = config.data.train_image_size
    if schedule is None:
        return lambda epoch: config.data.image_size
    return lambda epoch: _rounded(value_at(schedule, epoch))


def largest_image_size(config: Config) -> int:
    """The largest size that `image_size_at` gives."""
    schedule = config.data.train_image_size
    return config.data.image_size if schedule is None else _rounded(largest_value(schedule))


def _rounded(size: float) -> int:
    return max(_SIZE_MULTIPLE, round(size / _SIZE_MULTIPLE) * _SIZE_MULTIPLE)
