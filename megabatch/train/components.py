"""What one rank trains with: images, network, optimizer, statistics, and DDP with the way its gradients travel."""

from __future__ import annotations

import inspect
import os
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.comm.calibration import Choice
from megabatch.comm.exact import ExactSums
from megabatch.comm.grid import ProcessGrid
from megabatch.comm.hook import ExposedTimeHook, GradientHook, Hook, gradient_hook
from megabatch.comm.messages import broadcast
from megabatch.comm.noise_scale import NoiseScale
from megabatch.comm.shape import GridShape
from megabatch.config import Config
from megabatch.data.sources import Source
from megabatch.errors import CommunicationError, ConfigError, LaunchError
from megabatch.machine import usable_cores
from megabatch.model.average import WeightAverage
from megabatch.model.norm import GhostStatistics
from megabatch.model.normaliser import Normaliser, normaliser_of
from megabatch.model.pretrained import prepare_pretrained
from megabatch.model.registry import build_model
from megabatch.optim.build import build_optimizer
from megabatch.optim.eager import without_compiler
from megabatch.optim.skip import can_skip
from megabatch.schedule.adaptive import AdaptiveBatch
from megabatch.schedule.batch import parse_stages
from megabatch.train.branch import Trained
from megabatch.train.buckets import Bucketed
from megabatch.train.feed import open_images
from megabatch.train.graph import PassGraphs, check_can_capture
from megabatch.workers.world import World

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Components:
    """Everything one rank trains with.

    As a context manager it closes itself at the end of the block, unless the block fails: then another rank may be
    gone, and waiting for threads that wait for it would take long.
    """

    config: Config
    world: World  # the present one, in an elastic run
    shape: GridShape  # of the grid in it
    device: torch.device
    train_source: Source
    val_source: Source
    normalise: Normaliser
    network: nn.Module  # plain names, for state_dict and evaluation
    ema: WeightAverage | None  # of its weights
    ddp: DistributedDataParallel  # the same network, which averages gradients over ranks
    hook: GradientHook | None  # how they travel over the grid; None: by the backend's own all-reduce
    exact: ExactSums | None  # adds ghost batches' gradients as integers; None: in floats
    exposed: ExposedTimeHook  # around it: how long backward waits for them
    noise_scale: NoiseScale | None  # around that: the gradient's noise scale, where it is measured
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler  # of the loss, for fp16
    statistics: GhostStatistics
    graphs: PassGraphs | None  # of passes, where they are captured
    adaptive: AdaptiveBatch | None  # grows the batch by the noise scale
    is_elastic: bool  # workers come and go
    notes: tuple[str, ...] = ()  # to be said when the run begins
    choices: tuple[Choice, ...] = ()  # of "auto", for the worlds that follow in an elastic run

    @property
    def model(self) -> nn.Module:
        """What is evaluated and saved as the model: the network, or the average of its weights."""
        return self.network if self.ema is None else self.ema.model

    @property
    def trained(self) -> Trained:
        """What training changes."""
        return Trained(self.network, self.optimizer, self.statistics, self.scaler, self.exact, self.ema)

    @property
    def decides_on_device(self) -> bool:
        """Whether the device decides by itself if a step counts, so that the host may learn it a step late.

        An elastic run may lose a rank in any step, and must then have changed nothing: there the host must know.
        """
        return self.device.type != "cpu" and not self.is_elastic and can_skip(self.optimizer)

    def __enter__(self) -> Components:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.close()

    @property
    def passed(self) -> nn.Module:
        """The network that training passes, without DDP and without buckets: nothing but the pass happens."""
        module: nn.Module = self.ddp.module
        return module.network if isinstance(module, Bucketed) else module

    def pass_was_sent(self) -> None:
        """A backward pass has sent its gradients."""
        self.exposed.backward_ended()
        if isinstance(self.ddp.module, Bucketed):
            self.ddp.module.learn()

    def autocast(self) -> torch.autocast:
        """See `autocast_of`."""
        return autocast_of(self.config, self.device)

    def connect(self, world: World, shape: GridShape, timeout_seconds: float) -> None:
        """Send gradients over this world from now on, in an elastic run; DDP and everything else stay as they are."""
        comm = self.config.comm
        try:
            grid = ProcessGrid.build(
                shape,
                timeout_seconds=timeout_seconds,
                check_consistency=False,
                name="elastic",
                shared_memory=comm.shared_memory,
            )
        except LaunchError as error:
            raise CommunicationError(str(error)) from None
        grid.asks_who_is_missing = False
        if comm.algorithm == "auto" and world.size > 1:  # raced once: a newcomer takes what the senior worker chose
            known = broadcast([asdict(one) for one in self.choices], list[dict[str, Any]])
            grid.choices = tuple(Choice(**one) for one in known)
        self.hook, hook = _hook_over(grid, self.config, self.exact or False)
        self.choices = grid.choices or self.choices
        self.exposed.use(hook, self.hook)
        self.world, self.shape = world, shape

    def disconnect(self) -> None:
        """Let go of a world that is no more, whatever is under way there, and of the step that was not finished."""
        if self.hook is not None:
            self.hook.grid.hang_up()
            self._close_hook()
        self.optimizer.zero_grad(set_to_none=True)
        self.statistics.forget_step()
        if self.exact is not None:
            self.exact.rollback()

    def close(self) -> None:
        """Give back the threads and process groups that gradients use; the network stays as it is."""
        del self.ddp  # it holds the default process group
        self._close_hook()

    def _close_hook(self) -> None:
        if self.hook is not None:
            self.hook.close()
            self.hook.grid.close()


def build_components(
    config: Config, world: World, shape: GridShape, device: torch.device, *, is_elastic: bool = False
) -> Components:
    """Build everything on a rank that has already joined its world."""
    if config.train.cuda_graph:
        check_can_capture(device, world.size)
    train_source, val_source = open_images(config)
    network = build_network(config, train_source.num_classes, train_source.channels, device)
    if any(isinstance(module, nn.SyncBatchNorm) for module in network.modules()):
        raise ConfigError(
            f"model '{config.model.name}' has SyncBatchNorm, which waits for all workers in every ghost batch "
            "and hangs when they hold different numbers of them; use BatchNorm2d: it spans one ghost batch"
        )
    normalise = normaliser_of(config, train_source.channels, device)
    notes, head = prepare_pretrained(network, config.model, train_source.num_classes)
    with nullcontext() if config.train.compile else without_compiler():
        optimizer = build_optimizer(
            config.optimizer, network, head=head, backbone_lr_factor=config.model.backbone_lr_factor
        )
    half_life = config.model.ema_half_life_epochs * len(train_source)
    ema = WeightAverage(network, half_life) if half_life else None
    statistics = GhostStatistics(network, config.norm.momentum, config.norm.variance)
    hook, exposed = _gradient_hook(config, world, shape, device)
    with nullcontext() if config.train.compile else without_compiler():
        ddp = DistributedDataParallel(
            torch.compile(network) if config.train.compile else Bucketed(network) if device.type != "cpu" else network,
            device_ids=[device.index] if device.type == "cuda" else None,
            **no_buffer_sync(),  # GhostStatistics adds the statistics up
            gradient_as_bucket_view=True,
            bucket_cap_mb=config.comm.bucket_mb,
        )
    exact = hook.exact.bind(network.parameters()) if hook and hook.exact else None
    noise_scale = _noise_scale(config, network, exact)
    ddp.register_comm_hook(None, noise_scale.hook(None, exposed.hook) if noise_scale else exposed.hook)
    return Components(
        config=config,
        world=world,
        shape=shape,
        device=device,
        train_source=train_source,
        val_source=val_source,
        normalise=normalise,
        network=network,
        ema=ema,
        ddp=ddp,
        hook=hook,
        exact=exact,
        exposed=exposed,
        noise_scale=noise_scale,
        optimizer=optimizer,
        scaler=torch.amp.GradScaler(device.type, enabled=config.train.precision == "fp16"),
        statistics=statistics,
        graphs=PassGraphs(list(network.parameters()), device) if config.train.cuda_graph else None,
        adaptive=_adaptive_batch(config),
        is_elastic=is_elastic,
        notes=tuple(notes),
    )


def build_network(config: Config, num_classes: int, channels: int, device: torch.device) -> nn.Module:
    """The network with its initial weights: the same on every rank, because the seed is."""
    torch.manual_seed(config.train.seed)
    network = build_model(
        config.model.name,
        num_classes=num_classes,
        in_channels=channels,
        zero_gamma=config.model.zero_gamma,
        width=config.model.width,
    )
    memory_format = torch.channels_last if config.train.channels_last else torch.contiguous_format
    return network.to(device=device, memory_format=memory_format)  # type: ignore[call-overload,no-any-return]


def autocast_of(config: Config, device: torch.device) -> torch.autocast:
    """The precision of the forward pass; weights, gradients and batch-norm statistics stay in fp32."""
    dtype = DTYPES[config.train.precision]
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def set_threads(config: Config, local_size: int) -> None:
    """Share the host's cores among its ranks; more threads than cores make everything slower."""
    torch.set_num_threads(config.train.threads_per_worker or usable_cores(local_size))


def choose_kernels(config: Config, device: torch.device) -> None:
    """How a device chooses among kernels: exact sums promise bits, so they need kernels that repeat them.

    Otherwise cuDNN tries its kernels and takes the fastest. TF32 stays as torch has it, or NVIDIA_TF32_OVERRIDE says.
    """
    if device.type != "cuda":
        return
    repeats = config.comm.sums == "exact"
    torch.backends.cudnn.benchmark = not repeats
    torch.use_deterministic_algorithms(repeats, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a kernel per tensor
    if repeats:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read with the first product


def no_buffer_sync() -> dict[str, Any]:
    """`broadcast_buffers=False`, by the name this torch has for it (2.13 renamed it and warns about the old one)."""
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False}


def _gradient_hook(
    config: Config, world: World, shape: GridShape, device: torch.device
) -> tuple[GradientHook | None, ExposedTimeHook]:
    """The backend's own all-reduce, or an algorithm of ours over a grid; timed."""
    comm = config.comm
    exact = comm.sums == "exact"
    if not exact and (world.size == 1 or (comm.algorithm == "backend" and comm.grad_dtype == "fp32")):
        return None, ExposedTimeHook(device)
    grid = ProcessGrid.build(shape, timeout_seconds=comm.timeout_seconds, shared_memory=comm.shared_memory)
    state, hook = _hook_over(grid, config, exact)
    return state, ExposedTimeHook(device, hook, state)


def _hook_over(grid: ProcessGrid, config: Config, exact: bool | ExactSums) -> tuple[GradientHook, Hook]:
    """How gradients travel over this grid, by the settings."""
    algorithm = config.comm.algorithm if grid.world_size > 1 else "backend"
    return gradient_hook(grid, algorithm, grad_dtype=DTYPES[config.comm.grad_dtype], exact=exact, say=None)


def _noise_scale(config: Config, network: nn.Module, exact: ExactSums | None) -> NoiseScale | None:
    control = config.batch_control
    if not control.measures_noise:
        return None
    return NoiseScale(network.parameters(), control.smoothing, max(1, control.measure_every_steps), exact=exact)


def _adaptive_batch(config: Config) -> AdaptiveBatch | None:
    settings = config.batch_control.adaptive
    if settings is None:
        return None
    first = parse_stages(config.train.global_batch_size).global_batch_sizes[0]
    return AdaptiveBatch(first, ghost_batch_size=config.train.ghost_batch_size, **settings.model_dump())
