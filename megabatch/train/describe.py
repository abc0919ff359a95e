"""What a run says about itself: the numbers that follow from recipe and world, the conditions for its records, layers.

Nothing that identifies a person.
"""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megabatch.comm.messages import gather
from megabatch.comm.shape import GridShape
from megabatch.config import Config
from megabatch.data.sources import Source
from megabatch.machine import host_name, processor_name, usable_cores
from megabatch.schedule.batch import count_steps, parse_stages, shard_range
from megabatch.schedule.clock import Clock
from megabatch.schedule.pieces import largest_value
from megabatch.workers.world import World


def image_line(config: Config, train: Source, val: Source) -> str:
    """What a run learns from: "images  3,789 to train on, 947 to validate, 10 classes, 160 px, folder PATH"."""
    place = f" {config.data.path}" if config.data.path else ""
    return (
        f"images         {len(train):,} to train on, {len(val):,} to validate, {train.num_classes:,} classes, "
        f"{config.data.image_size} px, {config.data.source}{place}"
    )


def derived_lines(config: Config, clock: Clock, world_size: int, grid: GridShape, network: nn.Module) -> list[str]:
    """Workers x ghosts x accumulation, steps per epoch and in all, and the network's size, one line each."""
    stages = parse_stages(config.train.global_batch_size)
    ghost = config.train.ghost_batch_size
    num_parameters = sum(p.numel() for p in network.parameters())
    total = count_steps(stages, ghost, clock.samples_per_epoch, clock.total_samples)
    limit = f", stopping after {config.train.max_steps:,}" if 0 < config.train.max_steps < total else ""
    lines = [
        f"network        {config.model.name}, {num_parameters:,} parameters, {config.train.precision}",
        f"gradients      {num_parameters * 4 / 1e6:.1f} MB in fp32",
        f"workers        {world_size} in a grid of {grid.text}, gradients by {config.comm.algorithm}",
        f"global batch   {stages} images",
    ]
    for start, global_batch_size in zip(stages.from_epochs, stages.global_batch_sizes, strict=True):
        num_ghosts = global_batch_size // ghost
        counts = sorted({len(shard_range(num_ghosts, world_size, rank)) for rank in (0, world_size - 1)})
        each = " or ".join(str(count) for count in range(counts[0], counts[-1] + 1))
        lines.append(
            f"from epoch {start:<4g}{global_batch_size:,} = {num_ghosts:,} ghosts x {ghost}; "
            f"each worker accumulates {each}; {clock.samples_per_epoch / global_batch_size:.2f} steps an epoch"
        )
    optimizer = config.optimizer
    peak = largest_value(optimizer.lr) * optimizer.lr_factor
    lines.append(f"learning rate  up to {peak:.4g}, {optimizer.name}")
    at_most = ""
    if adaptive := config.batch_control.adaptive:
        at_most = "at most "
        lines.append(f"growing        by the noise scale, up to {adaptive.max_global_batch_size:,} images a step")
    if collapse := config.collapse:
        places = ", ".join(f"{epoch:.4g}" for epoch in collapse.at_epochs)
        lines.append(
            f"collapses      of {collapse.epochs:.4g} epochs each, from epoch {places} of the trunk, not counted below"
        )
    lines.append(
        f"in all         {at_most}{total:,} steps, {clock.total_samples:,} images, {clock.total_epochs:g} epochs "
        f"of {clock.samples_per_epoch:,}{limit}"
    )
    return lines


def describe_environment(world: World, grid: GridShape, device: torch.device) -> dict[str, Any]:
    """What a reader needs to judge or repeat the run; every rank must call it."""
    return {
        "versions": {name: installed_version(name) for name in ("megabatch", "torch", "numpy", "pillow")}
        | {"python": platform.python_version()},
        "platform": platform.platform(),
        "cores": usable_cores(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "backend": dist.get_backend(),
        "threads_per_worker": torch.get_num_threads(),
        "arithmetic": describe_arithmetic(),
        "hosts": gather(host_name(), str),
        "workers": world.size,
        "grid": list(grid.sizes),
        "launcher": world.launcher,
        "attempt": world.attempt,
        "commit": _commit(),
    }


def describe_arithmetic(*, on_cpu: bool = False) -> dict[str, Any]:
    """What the last bits of a ghost batch's gradient depend on, besides the device, the threads and the versions.

    on_cpu: leave out what only a run on accelerators depends on.
    """
    of_libraries = ("ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "DNNL_", "MKL_CBWR", "MKL_ENABLE_", "ONEDNN_")
    return {
        "processor": processor_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "onednn": torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
        "mkl": torch.backends.mkl.is_available(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        **(describe_kernels() if torch.cuda.is_available() and not on_cpu else {}),
        **{
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(of_libraries) and not name.endswith("_VERBOSE")
        },
    }


def describe_kernels() -> dict[str, Any]:
    """How CUDA devices choose among kernels, and which devices this process is shown (the names are ROCm's, too)."""
    shown = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE")
    return {
        "cudnn": torch.backends.cudnn.version(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "tf32_convolutions": torch.backends.cudnn.allow_tf32,
        "tf32_products": torch.backends.cuda.matmul.allow_tf32,
        **{name: os.environ[name] for name in shown if name in os.environ},
    }


def describe_data(train: Source, val: Source) -> dict[str, int]:
    """How many images a run learns from and is judged by, their classes and channels."""
    return {
        "train_images": len(train),
        "val_images": len(val),
        "classes": train.num_classes,
        "channels": train.channels,
    }


def describe_gradients(network: torch.nn.Module, channels: int, image_size: int) -> dict[str, Any]:
    """What travels in a step: bytes, and the layers of a network about to be trained.

    A forward pass finds the layers and leaves no trace in the network or in random numbers. They are None when
    somebody's own network does not take it: a run does not depend on this list.
    """
    num_bytes = sum(p.numel() * p.element_size() for p in network.parameters() if p.requires_grad)
    device = next(network.parameters()).device
    layers = None
    with suppress(Exception), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        layers = list_layers(network, torch.zeros(2, channels, image_size, image_size, device=device))
    return {"gradient_bytes": num_bytes, "layers": layers}


def list_layers(network: nn.Module, images: torch.Tensor) -> list[dict[str, Any]]:
    """Layers in the order of the forward pass with their parameters and part of the multiply-adds."""
    names = {module: name for name, module in network.named_modules()}
    seen: list[dict[str, Any]] = []

    def after(module: nn.Module, _inputs: Any, out: Any) -> None:
        count = sum(p.numel() for p in module.parameters(recurse=False))
        if not count:
            return
        if isinstance(module, nn.Conv2d):
            work = module.weight.numel() * out.shape[2] * out.shape[3]
        elif isinstance(module, nn.Linear):
            work = module.weight.numel()
        elif seen:  # a norm belongs to the layer before it
            seen[-1]["parameters"] += count
            return
        else:
            work = count
        seen.append({"name": names[module], "parameters": count, "work": float(work)})

    hooks = [module.register_forward_hook(after) for module in network.modules()]
    training = [(module, module.training) for module in network.modules()]
    try:
        with torch.no_grad():
            network.eval()(images)
    finally:
        for hook in hooks:
            hook.remove()
        for module, was_training in training:
            module.training = was_training
    whole = sum(layer["work"] for layer in seen)
    return [{**layer, "work": layer["work"] / whole} for layer in seen]


def installed_version(name: str) -> str | None:
    """The version of a package; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the source tree megabatch runs from, marked when files differ; None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-changed" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None
