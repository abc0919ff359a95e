"""Which device a rank has: two ranks with one are refused by name before NCCL is asked. Devices are stand-ins."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from megabatch.comm.device import check_devices
from megabatch.errors import LaunchError


def ask(numbers: list[int]) -> list[str]:
    """What each rank is told, by the number of its device."""
    store = HashStore()

    def rank_asks(rank: int) -> str:
        device = torch.device("cuda", numbers[rank])
        try:
            check_devices(store, rank, len(numbers), device, timedelta(seconds=10))
        except LaunchError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(rank_asks, range(len(numbers))))


def test_ranks_with_one_device_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {0: "GPU-1", 1: "GPU-2", 2: ""}
    properties = {torch.device("cuda", number): SimpleNamespace(uuid=name) for number, name in names.items()}
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    monkeypatch.setenv("MEGABATCH_HOST", "node1")
    said = "ranks 0, 2 on host node1 have the same device (GPU-1); start one worker per device"
    assert [one.startswith(said) for one in ask([0, 1, 0])] == [True] * 3
    assert ask([0, 1]) == ["", ""]
    assert ask([2, 2]) == ["", ""]  # nothing is known about them
