"""A model in DDP gets the mean of all ranks' gradients, over the grid that was asked for."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.integrations import register
from tests.ranks import run_ranks


def _gradient(rank: int) -> tuple[str, str, list[float]]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    grid, hook = register(ddp, "ring", grid="1x2")
    ddp(torch.tensor([[1.0 + rank, 3.0]])).sum().backward()
    hook.close()
    return grid.shape.text, hook.algorithm, ddp.module.weight.grad.flatten().tolist()


def test_gradients_are_averaged_over_the_grid() -> None:
    assert run_ranks(2, _gradient) == [("1x2", "ring", [1.5, 3.0])] * 2
