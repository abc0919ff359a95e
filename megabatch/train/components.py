"""What one rank trains with: images and how they are fed, network, optimizer, statistics, and DDP around it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.comm.grid import ProcessGrid
from megabatch.comm.hook import ExposedTimeHook, gradient_hook
from megabatch.comm.noise_scale import NoiseScale
from megabatch.comm.shape import GridShape
from megabatch.config import Config
from megabatch.data.batches import Feeding
from megabatch.data.broken_images import BrokenLog
from megabatch.data.decode import Decoding, check_decoder
from megabatch.data.formats import open_source
from megabatch.data.sources import ImageArray, Source, check_same_classes, downscale, limit_and_hold_out
from megabatch.data.verify import check_manifest
from megabatch.errors import ConfigError, DataError
from megabatch.machine import usable_cores
from megabatch.model.norm import GhostStatistics
from megabatch.model.registry import build_model
from megabatch.optim.build import build_optimizer
from megabatch.schedule.adaptive import AdaptiveBatch
from megabatch.schedule.batch import parse_stages
from megabatch.schedule.pieces import largest_value, value_at
from megabatch.train.world import World

__all__ = [
    "Components",
    "Feeds",
    "Normaliser",
    "autocast_of",
    "build_components",
    "build_network",
    "cores_of_worker",
    "feeding_of",
    "image_size_at",
    "largest_image_size",
    "open_images",
    "set_threads",
]

_ENCODED_LIMIT_BYTES = 64 * 2**20
_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Normaliser:
    """uint8 [n, height, width, channels] images -> float network input on the device, in one pass over the batch."""

    def __init__(self, config: Config, channels: int, device: torch.device) -> None:
        mean, std = config.data.mean, config.data.std
        if len(mean) not in (1, channels):
            raise ConfigError(
                f"data.mean has {len(mean)} values but images have {channels} channels; give one, or one per channel"
            )
        self._device = device
        self._channels_last = config.train.channels_last
        self._scale = (1.0 / (255.0 * torch.tensor(std, device=device))).view(1, -1, 1, 1)
        self._shift = -(torch.tensor(mean, device=device) / torch.tensor(std, device=device)).view(1, -1, 1, 1)

    def __call__(self, images: Tensor) -> Tensor:
        batch = images.to(self._device, non_blocking=True).permute(0, 3, 1, 2).to(torch.float32)
        if not self._channels_last:
            batch = batch.contiguous()
        return batch.mul_(self._scale).add_(self._shift)


@dataclass
class Components:
    """Everything one rank trains with."""

    config: Config
    world: World
    device: torch.device
    train_source: Source
    val_source: Source
    network: nn.Module  # plain names, for state_dict and evaluation
    ddp: DistributedDataParallel
    exposed: ExposedTimeHook
    choices: list[str]  # what comm.algorithm = "auto" chose by message size, and why
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    statistics: GhostStatistics
    normalise: Normaliser
    noise: NoiseScale | None
    adaptive: AdaptiveBatch | None

    def autocast(self) -> torch.autocast:
        return autocast_of(self.config, self.device)


def autocast_of(config: Config, device: torch.device) -> torch.autocast:
    """The precision of the forward pass; weights, gradients and batch-norm statistics stay in fp32."""
    dtype = _AUTOCAST[config.train.precision]
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def set_threads(config: Config, local_size: int) -> None:
    """Share the host's cores among its workers; more threads than cores make everything slower."""
    torch.set_num_threads(config.train.threads_per_worker or cores_of_worker(local_size))


def open_images(config: Config) -> tuple[Source, Source]:
    """The training and the validation images, checked against each other."""
    data = config.data
    options: dict[str, Any] = {"num_classes": data.num_classes} if data.num_classes else {}
    if data.source == "generated":
        options = {
            "image_size": data.image_size,
            "channels": data.generated.channels,
            "num_classes": data.generated.num_classes,
            "seed": config.train.seed,
        }
    is_generated = data.source == "generated"
    path = data.path if data.path and not is_generated else None
    train_size = {"num_images": data.generated.num_train} if is_generated else {}
    if data.source in ("parquet", "folder", "tar") and (data.max_train_images or data.held_out_images):
        train_size["memory_limit_bytes"] = _ENCODED_LIMIT_BYTES  # decode the chosen images only
    val_size = {"num_images": data.generated.num_val} if is_generated else {}
    train = open_source(data.source, path, "train", **options, **train_size)
    val = open_source(data.source, path, "val", **options, **val_size)
    check_same_classes(train, val)
    if path is not None and "://" not in path:
        check_manifest(data.source, Path(path), "train", train)
        check_manifest(data.source, Path(path), "val", val)
    train, held_out = limit_and_hold_out(train, data.max_train_images, data.held_out_images)
    val = val if held_out is None else held_out
    if data.downscale:
        train, val = downscale(train, data.image_size), downscale(val, data.image_size)
    if len(train) < config.train.ghost_batch_size:
        raise DataError(
            f"the training set has {len(train)} images, one ghost batch needs {config.train.ghost_batch_size}; "
            "give more images or a smaller train.ghost_batch_size"
        )
    return train, val


def build_network(config: Config, source: Source, device: torch.device) -> nn.Module:
    """The network with its initial weights: the same on every worker, because the seed is."""
    torch.manual_seed(config.train.seed)
    network = build_model(
        config.model.name,
        num_classes=source.num_classes,
        in_channels=source.channels,
        zero_gamma=config.model.zero_gamma,
        width=config.model.width,
    )
    memory_format = torch.channels_last if config.train.channels_last else torch.contiguous_format
    return network.to(device=device, memory_format=memory_format)  # type: ignore[call-overload,no-any-return]


def _no_buffer_sync() -> dict[str, Any]:
    """`broadcast_buffers=False`, by the name this torch has for it (2.13 renamed it and warns about the old one)."""
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False}


def _gradient_hook(
    config: Config, world: World, shape: GridShape, device: torch.device
) -> tuple[ExposedTimeHook, list[str]]:
    """The backend's own all-reduce, or an algorithm of ours over the grid, timed; and what "auto" chose."""
    settings = config.comm
    if world.size == 1 or (settings.algorithm == "backend" and settings.grad_dtype == "fp32"):
        return ExposedTimeHook(device), []
    grid = ProcessGrid.build(shape, timeout_seconds=settings.timeout_seconds)
    state, hook = gradient_hook(grid, settings.algorithm, grad_dtype=_AUTOCAST[settings.grad_dtype])
    return ExposedTimeHook(device, hook, state), state.explanation


def _noise_scale(config: Config, network: nn.Module) -> NoiseScale | None:
    control = config.batch_control
    if not control.measures_noise:
        return None
    return NoiseScale(network.parameters(), control.smoothing, max(1, control.measure_every_steps))


def _adaptive_batch(config: Config) -> AdaptiveBatch | None:
    settings = config.batch_control.adaptive
    if settings is None:
        return None
    first = parse_stages(config.train.global_batch_size).global_batch_sizes[0]
    return AdaptiveBatch(first, ghost_batch_size=config.train.ghost_batch_size, **settings.model_dump())


def build_components(config: Config, world: World, shape: GridShape, device: torch.device) -> Components:
    """Build all parts on a rank that has already joined its world."""
    train_source, val_source = open_images(config)
    network = build_network(config, train_source, device)
    if any(isinstance(module, nn.SyncBatchNorm) for module in network.modules()):
        raise ConfigError(
            f"model '{config.model.name}' has SyncBatchNorm, which waits for all workers in every ghost batch "
            "and hangs when they hold different numbers of them; use BatchNorm2d: it spans one ghost batch"
        )
    statistics = GhostStatistics(network, config.norm.momentum, config.norm.variance)
    exposed, choices = _gradient_hook(config, world, shape, device)
    ddp = DistributedDataParallel(
        torch.compile(network) if config.train.compile else network,
        device_ids=[device.index] if device.type == "cuda" else None,
        **_no_buffer_sync(),  # statistics are local until GhostStatistics adds them up
        gradient_as_bucket_view=True,
        bucket_cap_mb=config.comm.bucket_mb,
    )
    noise = _noise_scale(config, network)
    ddp.register_comm_hook(None, noise.hook(exposed.hook) if noise else exposed.hook)
    return Components(
        config=config,
        world=world,
        device=device,
        train_source=train_source,
        val_source=val_source,
        network=network,
        ddp=ddp,
        exposed=exposed,
        choices=choices,
        optimizer=build_optimizer(config.optimizer, network),
        scaler=torch.amp.GradScaler(device.type, enabled=config.train.precision == "fp16"),
        statistics=statistics,
        normalise=Normaliser(config, train_source.channels, device),
        noise=noise,
        adaptive=_adaptive_batch(config),
    )


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
