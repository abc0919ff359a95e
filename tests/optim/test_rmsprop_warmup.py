"""RMSprop warm-up against the paper's formulas and against torch at both ends; the transition by epoch."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from megabatch.errors import ConfigError
from megabatch.optim.groups import parameter_groups
from megabatch.optim.rmsprop_warmup import RMSpropWarmup, sgd_share

# (epoch, rate): before the center, in the transition, where the printed one overshoots, and after it.
STEPS = ((0.0, 6.4), (0.5, 6.4), (8.0, 6.4), (10.5, 3.0), (11.9, 6.4), (12.4, 6.4), (12.5, 0.9), (40.0, 0.1), (41, 0.0))
Array = np.ndarray[Any, np.dtype[np.float64]]


def share_as_printed(epoch: float, slope: float) -> float:
    if epoch < 10:
        return 0.5 * math.exp(2 * (epoch - 10) / 5)
    return 0.5 + slope * (epoch - 10) / 5 if epoch < 12.5 else 1.0


def reference(state: tuple[Array, Array, Array], g: Array, epoch: float, eta: float, slope: float, decay: float) -> Any:
    """The paper's update with Delta as it has it (the opposite sign of ours)."""
    theta, delta, m = state
    g = g + decay * theta
    share = share_as_printed(epoch, slope)
    m = 0.99 * m + (1 - 0.99) * g**2
    rmsprop = (1 - share) * 3e-4 / eta if share != 1 else 0.0
    delta = 0.9 * delta - (share + rmsprop / (np.sqrt(m) + 1e-8)) * g
    return theta + eta * delta, delta, m


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("literal", [False, True])
@pytest.mark.parametrize("whole_epochs", [False, True])
@pytest.mark.parametrize("decay", [0.0, 1e-2])
def test_it_follows_the_paper(dtype: torch.dtype, literal: bool, whole_epochs: bool, decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    params = [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in ((4, 3, 3, 3), (7,), (1,))
    ]
    optimizer = RMSpropWarmup(params, 1.0, weight_decay=decay, literal=literal, whole_epochs=whole_epochs)
    states = [(p.detach().double().numpy().copy(), *np.zeros((2, *p.shape))) for p in params]
    for epoch, rate in STEPS:
        optimizer.set_epoch(epoch)
        for group in optimizer.param_groups:
            group["lr"] = rate
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=generator, dtype=dtype) * 0.01
            seen = math.floor(epoch) if whole_epochs else epoch
            g = p.grad.double().numpy()
            states[i] = reference(states[i], g, seen, rate, 2.0 if literal else 1.0, decay)
        optimizer.step()
        for p, (theta, _, _) in zip(params, states, strict=True):
            tolerance = 1e-12 if dtype == torch.float64 else 3e-4
            np.testing.assert_allclose(p.detach().double().numpy(), theta, rtol=tolerance, atol=tolerance * 0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, epochs: tuple[float, ...]) -> None:
    generator = torch.Generator().manual_seed(int(10 * epochs[0]))
    for epoch in epochs:
        if isinstance(optimizer, RMSpropWarmup):
            optimizer.set_epoch(epoch)
        optimizer.zero_grad()
        images = torch.randn(6, 3, 8, 8, generator=generator)
        nn.functional.cross_entropy(model(images), torch.arange(6) % 3).backward()
        optimizer.step()


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)
    )


def test_after_the_transition_it_is_torch_sgd_bit_for_bit() -> None:
    ours = network()
    theirs = copy.deepcopy(ours)
    late = (12.5, 13.0, 60.0)
    train(ours, RMSpropWarmup(parameter_groups(ours), 0.1, weight_decay=1e-3), late)
    groups = parameter_groups(theirs, weight_decay=1e-3)
    train(theirs, torch.optim.SGD(groups, 0.1, momentum=0.9, foreach=True), late)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


def test_far_before_the_transition_it_is_torch_rmsprop_without_momentum_correction() -> None:
    """With the center far away the share of SGD vanishes; torch's RMSprop keeps the rate outside the momentum too."""
    ours = network()
    theirs = copy.deepcopy(ours)
    train(ours, RMSpropWarmup(ours.parameters(), 5.0, center_epoch=1000.0), (0.0, 1.0, 2.0))
    train(
        theirs, torch.optim.RMSprop(theirs.parameters(), lr=3e-4, alpha=0.99, eps=1e-8, momentum=0.9), (0.0, 1.0, 2.0)
    )
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_half_precision_parameters_are_refused() -> None:
    """1e-4 squared is below the smallest number of fp16."""
    for dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(ConfigError, match="needs fp32 or fp64 parameters"):
            RMSpropWarmup([nn.Parameter(torch.zeros(3, dtype=dtype))], 1.0)


def test_saved_in_the_transition_it_goes_on_bit_for_bit() -> None:
    whole = network()
    half = copy.deepcopy(whole)
    first, second = (RMSpropWarmup(parameter_groups(model), 0.3, weight_decay=1e-3) for model in (whole, half))
    train(whole, first, (9.0, 10.0, 11.0))
    train(half, second, (9.0, 10.0, 11.0))
    saved = io.BytesIO()
    torch.save(second.state_dict(), saved)
    saved.seek(0)
    again = RMSpropWarmup(parameter_groups(half), 0.1)
    again.load_state_dict(torch.load(saved, weights_only=True))
    assert again.param_groups[0]["epoch"] == 11.0
    train(whole, first, (11.5, 12.4, 13.0))
    train(half, again, (11.5, 12.4, 13.0))
    for one, other in zip(whole.parameters(), half.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_rate_of_zero_has_no_meaning_before_the_transition_ends() -> None:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = RMSpropWarmup([parameter], 0.0)
    with pytest.raises(ConfigError, match="lr 0 at epoch 0"):
        optimizer.step()
    assert torch.equal(parameter.detach(), torch.ones(1))
    optimizer.set_epoch(12.5)
    optimizer.step()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr": -1.0}, "lr -1"),
        ({"rmsprop_lr": math.nan}, "rmsprop_lr nan"),
        ({"center_epoch": -1.0}, "center_epoch -1"),
        ({"period_epochs": 0.0}, "period_epochs 0"),
        ({"smoothing": 1.0}, "smoothing 1"),
        ({"eps": 0.0}, "eps 0"),
    ],
)
def test_values_that_cannot_work_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RMSpropWarmup([nn.Parameter(torch.ones(1))], **{"lr": 0.1, **settings})
    with pytest.raises(ConfigError, match="epoch -1"):
        RMSpropWarmup([nn.Parameter(torch.ones(1))], 0.1).set_epoch(-1)


@pytest.mark.parametrize(
    ("epoch", "share", "printed"),
    [
        (0, 0.0092, 0.0092),
        (2, 0.0204, 0.0204),
        (5, 0.0677, 0.0677),
        (8, 0.2247, 0.2247),
        (10, 0.5, 0.5),
        (11, 0.7, 0.9),
        (12, 0.9, 1.3),
        (12.5, 1.0, 1.0),
        (90, 1.0, 1.0),
    ],
)
def test_values_of_the_paper(epoch: float, share: float, printed: float) -> None:
    assert sgd_share(epoch) == pytest.approx(share, abs=5e-5)
    assert sgd_share(epoch, literal=True) == pytest.approx(printed, abs=5e-5)


def test_the_transition_is_continuous_and_smooth_at_the_center_and_the_printed_one_jumps() -> None:
    tiny = 1e-7
    for joint in (10.0, 12.5):
        assert sgd_share(joint - tiny) == pytest.approx(sgd_share(joint), abs=1e-6)
    before = (sgd_share(10.0) - sgd_share(10.0 - 1e-4)) / 1e-4
    after = (sgd_share(10.0 + 1e-4) - sgd_share(10.0)) / 1e-4
    assert before == pytest.approx(after, rel=1e-3)
    assert after == pytest.approx(1 / 5)
    assert sgd_share(12.5 - tiny, literal=True) == pytest.approx(1.5, abs=1e-6)


def test_center_and_period_move_and_stretch_it() -> None:
    assert sgd_share(4.0, 3.0, 2.0) == 1.0
    assert sgd_share(3.5, 3.0, 2.0) == 0.75
    assert sgd_share(2.0, 3.0, 2.0) == pytest.approx(0.5 * math.exp(-1.0))
