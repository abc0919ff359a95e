"""What a rank trains with gives back what it took: threads and process groups."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import megabatch
from megabatch.model.norm import GhostStatistics
from megabatch.model.registry import build_model
from megabatch.recipes import load_config
from megabatch.train.components import choose_kernels, no_buffer_sync
from megabatch.train.describe import describe_kernels
from tests.ranks import run_ranks
from tests.system.runs import small_config


def groups_and_threads() -> tuple[int, int]:
    bucket_threads = [thread for thread in threading.enumerate() if thread.name.startswith("megabatch")]
    return len(dist.distributed_c10d._world.pg_map), len(bucket_threads)


def train_twice(rank: int, folder: str) -> list[tuple[int, int]]:
    config = small_config("train.max_steps=3", "comm.algorithm=torus")
    found = [groups_and_threads()]
    for number in (1, 2):
        megabatch.train(config, output=f"{folder}/{number}", grid="1x2")
        found.append(groups_and_threads())
    return found


def test_runs_in_a_group_that_is_there_leave_no_groups_and_no_threads_behind(tmp_path: Path) -> None:
    for found in run_ranks(2, train_twice, str(tmp_path)):
        assert found == [(1, 0)] * 3


@pytest.mark.parametrize("sums", ["exact", "float"])
def test_exact_sums_take_kernels_that_repeat_their_bits(monkeypatch: pytest.MonkeyPatch, sums: str) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", sums == "exact")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        choose_kernels(load_config("demo", [f"comm.sums={sums}"]), torch.device("cuda", 0))
        assert torch.are_deterministic_algorithms_enabled() == (sums == "exact")
        assert torch.backends.cudnn.benchmark == (sums == "float")
        assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == (sums == "exact")
        told = describe_kernels()
        assert told["cudnn_benchmark"] == (sums == "float")
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def losses_compiled(rank: int, compiled: bool) -> tuple[list[float], int]:
    """Of four steps of two ghost batches on two ranks; and how many graphs torch made of the network."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    graphs = 0

    def count(module: torch.fx.GraphModule, _inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return module.forward

    network = build_model("resnet8", num_classes=10, in_channels=1, width=64)
    statistics = GhostStatistics(network, momentum=0.1)
    module: Any = torch.compile(network, backend=count) if compiled else network
    ddp = DistributedDataParallel(module, bucket_cap_mb=1.0, gradient_as_bucket_view=True, **no_buffer_sync())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    found = []
    for step in range(4):
        optimizer.zero_grad()
        for number in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * number + rank)
            images = torch.randn(6, 1, 12, 12, generator=generator)
            with ddp.no_sync() if number == 0 else statistics.ghost():
                loss = ddp(images).square().mean()
                loss.backward()
        optimizer.step()
        statistics.after_step()
        found.append(loss.item())
    return found, graphs


def test_a_compiled_network_is_cut_at_buckets_and_trains_alike() -> None:
    """One graph in one piece would have all gradients at its end: none would travel while backward goes on."""
    plain, compiled = run_ranks(2, losses_compiled, False), run_ranks(2, losses_compiled, True)
    for (expected, none), (found, graphs) in zip(plain, compiled, strict=True):
        assert none == 0
        assert graphs > 2
        for a, b in zip(found, expected, strict=True):
            assert abs(a - b) < 1e-4 * abs(b)
