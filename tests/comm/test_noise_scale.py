"""The noise scale inside a DDP loop: exact against float64, whatever the number of workers and the layout of pieces."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import megabatch
from megabatch.comm.grid import ProcessGrid
from megabatch.comm.hook import gradient_hook
from megabatch.comm.noise_scale import NoiseScale
from megabatch.schedule.batch import shard_range
from megabatch.schedule.noise import noise_sample
from tests.ranks import run_ranks

SIZES = (4, 8, 2, 6, 6)  # images of the pieces of one step; weights by size
FEATURES, STEPS = 7, 3


def piece(step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = np.random.default_rng([step, index])
    inputs = numbers.normal(size=(SIZES[index], FEATURES)) + 0.3
    return torch.from_numpy(inputs), torch.from_numpy(inputs @ np.arange(FEATURES) + numbers.normal(size=SIZES[index]))


def network() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(FEATURES, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def oracle() -> list[tuple[float, float]]:
    """(noise, signal) of every step at the initial weights, from whole gradients of the pieces."""
    found = []
    for step in range(STEPS):
        gradients = []
        for index in range(len(SIZES)):
            model = network()
            inputs, targets = piece(step, index)
            (model(inputs)[:, 0] - targets).square().mean().backward()
            gradients.append(np.concatenate([p.grad.numpy().ravel() for p in model.parameters() if p.grad is not None]))
        weights = np.array(SIZES) / sum(SIZES)
        small = sum(w * float(g @ g) for w, g in zip(weights, gradients, strict=True))
        mean = sum(w * g for w, g in zip(weights, gradients, strict=True))
        sizes = np.array(SIZES)
        sample = noise_sample(
            small, float(mean @ mean), float((weights / sizes).sum()), float((weights**2 / sizes).sum())
        )
        assert sample is not None
        found.append((sample.noise, sample.signal))
    return found


def measure(rank: int, use_grid: bool, loss_scale: float, every_steps: int) -> dict[str, Any]:
    size = dist.get_world_size()
    ddp = DistributedDataParallel(network(), gradient_as_bucket_view=True, bucket_cap_mb=1e-4)
    noise = NoiseScale(ddp.parameters(), smoothing=0.0, every_steps=every_steps)
    if use_grid:
        state, reduce = gradient_hook(ProcessGrid.build((1, size)), algorithm="ring")
        ddp.register_comm_hook(None, noise.hook(state, reduce))
    else:
        ddp.register_comm_hook(None, noise.hook())
    found = []
    for step in range(STEPS):
        ddp.zero_grad(set_to_none=True)
        noise.begin_step()
        mine = shard_range(len(SIZES), size, rank)
        for index in mine or [0]:  # without a piece a rank is idle: it makes a pass of weight 0
            inputs, targets = piece(step, index)
            with nullcontext() if index == (mine or [0])[-1] else ddp.no_sync():
                loss = (ddp(inputs)[:, 0] - targets).square().sum() * size / sum(SIZES) * bool(mine)
                (loss * loss_scale).backward()
            noise.after_backward(SIZES[index], SIZES[index] / sum(SIZES) * bool(mine))
        noise.end_step(loss_scale)
        found.append((noise.average.noise, noise.average.signal))
    return {"found": found, "scale": noise.scale, "state": noise.state_dict()}


@pytest.mark.parametrize(("world_size", "use_grid"), [(1, False), (2, False), (3, True), (6, True)])
def test_every_layout_of_pieces_gives_the_same_estimate(world_size: int, use_grid: bool) -> None:
    expected = np.array(oracle())
    assert (np.abs(expected[0] - expected[1]) > 1e-3).all()  # steps are told apart
    for result in run_ranks(world_size, measure, use_grid, 1024.0, 1):
        np.testing.assert_allclose(result["found"], expected, rtol=1e-9)
        noise, signal = expected[-1]
        assert result["scale"] == (pytest.approx(noise / signal) if min(noise, signal) > 0 else None)


def test_only_every_second_step_is_measured() -> None:
    expected = oracle()
    [result] = run_ranks(1, measure, False, 1.0, 2)
    np.testing.assert_allclose(result["found"], [expected[0], expected[0], expected[2]], rtol=1e-9)
    assert result["state"]["count"] == 2


def test_an_step_that_is_not_wanted_is_left_out_and_state_goes_on() -> None:
    model = network()
    noise = megabatch.NoiseScale(model.parameters(), smoothing=0.5)
    noise.begin_step(wanted=False)
    noise.after_backward(8, 1.0)
    assert noise.end_step() is None
    noise.load_state_dict({"noise": 6.0, "signal": 2.0, "count": 3, "steps": 3})
    assert noise.scale == pytest.approx(3.0)
    assert noise.state_dict() == {"noise": 6.0, "signal": 2.0, "count": 3, "steps": 3}


def test_without_ddp_on_a_problem_whose_noise_is_known() -> None:
    """Linear model, gradient of one image = mean + noise of known covariance: trace 6, |mean|^2 = 0.25."""
    numbers = np.random.default_rng(0)
    deviation, mean = np.sqrt([1.0, 2.0, 3.0]), np.array([0.3, 0.4, 0.0])
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    noise = NoiseScale([weight], smoothing=0.999)
    for _ in range(3000):
        weight.grad = None
        noise.begin_step()
        for _ in range(8):
            images = torch.from_numpy(mean + deviation * numbers.normal(size=(4, 3)))
            ((images @ weight).mean() / 8).backward()
            noise.after_backward(4, 1 / 8)
        noise.end_step()
    assert noise.average.noise / (1 - 0.999**3000) == pytest.approx(6.0, rel=0.03)
    assert noise.scale == pytest.approx(24.0, rel=0.15)
