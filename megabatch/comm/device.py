"""Which device a rank has for itself. NCCL needs one for each rank, and does not say which ranks share one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Store

from megabatch.comm.shape import ranks_text
from megabatch.errors import LaunchError
from megabatch.machine import host_name

_HEARD_SECONDS = 10.0


def device_name(device: torch.device) -> str:
    """What tells a CUDA device from all others of its host, whatever number it has here; empty when nothing does."""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def same_device(places: Sequence[tuple[str, str]]) -> str:
    """Which ranks have the same device, and what to do; empty when none do.

    places: host and device by rank. A device without a name may be shared.
    """
    by_place: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(places):
        by_place.setdefault(place, []).append(rank)
    for (host, device), ranks in by_place.items():
        if device and len(ranks) > 1:
            shared = f"{ranks_text(ranks)} on host {host} have the same device ({device})"
            return f"{shared}; start one worker per device, or show each worker its own"
    return ""


def check_devices(store: Store, rank: int, world_size: int, device: torch.device, timeout: timedelta) -> None:
    """Refuse two ranks on one device before NCCL is asked, which connects at once and fails without naming them.

    Raises:
        LaunchError: on every rank, who shares which device. Rank 0, which may hold the store, is the last to leave.
    """
    store.set(f"device {rank}", json.dumps([host_name(), device_name(device)]))
    if rank == 0:
        keys = [f"device {one}" for one in range(world_size)]
        store.wait(keys, timeout)
        store.set("same device", same_device([tuple(json.loads(place)) for place in store.multi_get(keys)]))
    if shared := store.get("same device").decode():
        store.set(f"heard {rank}", "")
        if rank == 0:
            with suppress(RuntimeError):
                store.wait([f"heard {one}" for one in range(world_size)], timedelta(seconds=_HEARD_SECONDS))
        raise LaunchError(shared)
