"""`state_dict` of whatever has a state may be called on one rank only: nobody waits for the others."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import megabatch
from tests.ranks import run_ranks

OPTIMIZERS = ("LAMB", "LARS", "RMSpropWarmup", "Shampoo")


def train_and_ask(rank: int, optimizer_name: str, exact: bool) -> dict[str, Any]:
    """Two steps of a loop with everything in it; only rank 0 asks for states, between them."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 5))
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    grid, optimizer = megabatch.ProcessGrid.build(), getattr(megabatch, optimizer_name)(model.parameters(), lr=0.01)
    state, hook = megabatch.gradient_hook(grid, "torus", exact=exact)
    exact_sums = state.exact.bind(ddp.parameters()) if state.exact else None
    noise = megabatch.NoiseScale(model.parameters(), exact=exact_sums)
    ddp.register_comm_hook(None, noise.hook(state, hook))
    statistics = megabatch.GhostStatistics(model, momentum=1.0)
    average = megabatch.WeightAverage(model, half_life_samples=64)
    control = megabatch.BatchControl(
        16, ghost_batch_size=4, samples_per_epoch=32, epochs=1, rank=rank, world_size=dist.get_world_size()
    )
    states: dict[str, Any] = {}
    for step in control:
        for _ in exact_sums.attempts(num_ghosts=step.num_ghosts) if exact_sums else [None]:
            optimizer.zero_grad()
            noise.begin_step()
            for number, positions in enumerate(step.ghosts):
                is_last = number == len(step.ghosts) - 1
                wait: AbstractContextManager[Any] = nullcontext() if is_last else ddp.no_sync()
                generator = torch.Generator().manual_seed(positions.start)
                images = torch.randn(len(positions), 3, 8, 8, generator=generator)
                with wait, statistics.ghost():
                    loss = nn.functional.cross_entropy(ddp(images), torch.arange(len(positions)), reduction="sum")
                    (loss / len(positions) if exact_sums else loss * step.loss_weight).backward()
                noise.after_backward(len(positions), step.ghost_weight)
                if exact_sums:
                    exact_sums.add_ghost()
            noise.end_step()
        optimizer.step()
        statistics.after_step()
        average.update(step.num_samples)
        if rank == 0:
            owners: dict[str, Any] = {"noise": noise, "statistics": statistics, "average": average, "control": control}
            owners |= {"optimizer": optimizer} | ({"exact": exact_sums} if exact_sums else {})
            states = {name: owner.state_dict() for name, owner in owners.items()}
    dist.barrier()
    return {name: sorted(map(str, value)) for name, value in states.items()}


@pytest.mark.parametrize("exact", [False, True], ids=["floats", "exact"])
def test_state_dict_on_one_rank_waits_for_nobody(exact: bool) -> None:
    found, nothing = run_ranks(2, train_and_ask, "LARS", exact, timeout_seconds=60, group_timeout_seconds=10)
    assert nothing == {}
    assert set(found) == {"noise", "statistics", "average", "control", "optimizer"} | ({"exact"} if exact else set())
    assert all(found.values())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_on_one_rank(name: str) -> None:
    found, _ = run_ranks(2, train_and_ask, name, False, timeout_seconds=60, group_timeout_seconds=10)
    assert found["optimizer"] == ["param_groups", "state"]
