"""The conditions of a run for its records: versions, hosts, grid, commit. Nothing that identifies a person."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megabatch.comm.shape import GridShape
from megabatch.machine import usable_cores
from megabatch.train.layers import layers_or_none
from megabatch.train.world import World

__all__ = ["describe_environment", "describe_gradients"]


def describe_environment(world: World, hosts: list[str], grid: GridShape, device: torch.device) -> dict[str, Any]:
    """What a reader needs to judge or repeat the run."""
    return {
        "versions": {name: _version(name) for name in ("megabatch", "torch", "numpy")}
        | {"python": platform.python_version()},
        "platform": platform.platform(),
        "cores": usable_cores(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "backend": dist.get_backend(),
        "threads_per_worker": torch.get_num_threads(),
        "hosts": hosts,
        "workers": world.size,
        "grid": list(grid.sizes),
        "launcher": world.launcher,
        "attempt": world.attempt,
        "commit": _commit(),
    }


def describe_gradients(network: torch.nn.Module, channels: int, image_size: int) -> dict[str, Any]:
    """What travels in a step: bytes and layers."""
    num_bytes = sum(p.numel() * p.element_size() for p in network.parameters() if p.requires_grad)
    layers = layers_or_none(network, channels, image_size)
    return {"gradient_bytes": num_bytes, "layers": layers}


def _version(name: str) -> str | None:
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
