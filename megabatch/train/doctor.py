"""Looks over the machine and the allocation before anybody waits for a run: `megabatch doctor`."""

from __future__ import annotations

import platform
import shutil
import socket
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from megabatch.data.idx import find_fashion_mnist
from megabatch.data.storage import default_cache
from megabatch.errors import DataError, LaunchError
from megabatch.machine import usable_cores
from megabatch.train.world import read_world

__all__ = ["examine", "print_findings"]

Finding = dict[str, Any]


def examine(environ: Mapping[str, str]) -> list[Finding]:
    """Findings in the order a person would ask: `name`, `good` (None: just a fact) and `text`."""
    return [
        *_software(),
        *_hardware(),
        _launcher(environ),
        _meeting(),
        _data(),
        _disk(Path.cwd()),
    ]


def print_findings(findings: list[Finding], console: Console | None = None) -> None:
    console = console or Console(highlight=False, soft_wrap=True)
    marks = {True: "[green]ok  [/]", False: "[red]bad [/]", None: "    "}
    for finding in findings:
        console.print(f"{marks[finding['good']]}{finding['name']:<14}", end="")
        console.print(finding["text"], markup=False)


def _software() -> list[Finding]:
    names = ("megabatch", "torch", "numpy", "safetensors", "timm")
    found = []
    for name in names:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} not installed")
    return [{"name": "software", "good": None, "text": f"python {platform.python_version()}, {', '.join(found)}"}]


def _hardware() -> list[Finding]:
    import torch
    import torch.distributed as dist

    memory_gb = psutil.virtual_memory().total / 1e9
    backends = [
        name
        for name, there in (
            ("gloo", dist.is_available() and dist.is_gloo_available()),
            ("nccl", dist.is_available() and dist.is_nccl_available()),
        )
        if there
    ]
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    accelerators = ", ".join(devices) if devices else "none: training runs on the CPU"
    return [
        {
            "name": "host",
            "good": None,
            "text": f"{socket.gethostname()}, {usable_cores()} cores, {memory_gb:.1f} GB of memory",
        },
        {"name": "accelerators", "good": None, "text": accelerators},
        {
            "name": "backends",
            "good": bool(backends),
            "text": ", ".join(backends) or "none: this torch cannot communicate",
        },
    ]


def _launcher(environ: Mapping[str, str]) -> Finding:
    try:
        world = read_world(environ)
    except LaunchError as error:
        return {"name": "launcher", "good": False, "text": str(error)}
    if world is None:
        return {
            "name": "launcher",
            "good": None,
            "text": "none: `megabatch train` starts local workers itself",
        }
    text = (
        f"{world.launcher}: rank {world.rank} of {world.size}, "
        f"number {world.local_rank} of {world.local_size} on this host, "
        f"meeting at {world.meeting_host}:{world.meeting_port}"
    )
    return {"name": "launcher", "good": True, "text": text}


def _meeting() -> Finding:
    """Whether this host can find itself by name, which Gloo needs to choose the address it listens on."""
    name = socket.gethostname()
    try:
        return {"name": "host name", "good": True, "text": f"{name} is {socket.gethostbyname(name)}"}
    except OSError:
        text = (
            f"'{name}' has no address; add it to /etc/hosts, or set GLOO_SOCKET_IFNAME to the network interface to use"
        )
        return {"name": "host name", "good": False, "text": text}


def _data() -> Finding:
    try:
        return {"name": "fashion-mnist", "good": True, "text": str(find_fashion_mnist(default_cache()))}
    except DataError:
        return {
            "name": "fashion-mnist",
            "good": None,
            "text": "not here yet; `megabatch data get fashion-mnist` gets it",
        }


def _disk(folder: Path) -> Finding:
    free_gb = shutil.disk_usage(folder).free / 1e9
    good = free_gb > 1.0
    text = f"{free_gb:.1f} GB free in {folder}"
    return {"name": "disk", "good": good, "text": text if good else f"{text}; checkpoints need room"}
