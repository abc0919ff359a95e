"""Optimizers from elsewhere: built with their settings, scheduled like ours, and one line for every mistake."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pytorch_optimizer import SM3, Lion
from torch import nn

from megabatch.config import OptimizerConfig
from megabatch.errors import ConfigError
from megabatch.optim.build import build_optimizer, schedule_optimizer


def settings(name: str, **values: Any) -> OptimizerConfig:
    return OptimizerConfig.model_validate({"name": name, "lr": 0.5, **values})


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))


def test_settings_reach_it_and_schedules_move_it() -> None:
    falling = [{"until_epoch": 2, "shape": "linear", "start": 0.9, "end": 0.5}]
    given = {"betas": [0.9, 0.98], "weight_decouple": False}
    chosen = settings("pytorch_optimizer:Lion", momentum=falling, settings=given)
    optimizer = build_optimizer(chosen, network())
    assert isinstance(optimizer, Lion)
    schedule_optimizer(optimizer, chosen, 1.0)
    for group, decay in zip(optimizer.param_groups, (1e-4, 0.0), strict=True):
        assert (group["lr"], group["weight_decay"], group["weight_decouple"]) == (0.5, decay, False)
        assert group["betas"] == (pytest.approx(0.7), 0.98)


def test_momentum_goes_where_there_are_no_betas() -> None:
    chosen = settings("pytorch_optimizer:SM3", momentum=0.3, weight_decay=0)
    optimizer = build_optimizer(chosen, network())
    assert isinstance(optimizer, SM3)
    assert [group["momentum"] for group in optimizer.param_groups] == [0.3, 0.3]


def test_a_step_is_the_one_of_the_class_itself() -> None:
    torch.manual_seed(1)
    model, twin = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)
    twin.load_state_dict(model.state_dict())
    model.weight.grad = torch.randn(3, 4)
    twin.weight.grad = model.weight.grad.clone()
    build_optimizer(settings("pytorch_optimizer:Lion", lr=0.01, weight_decay=0.2), model).step()
    Lion(twin.parameters(), 0.01, weight_decay=0.2).step()
    assert torch.equal(model.weight, twin.weight)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"name": "no_such_package.optim:Best"}, "needs the module no_such_package, which is not installed"),
        ({"name": "pytorch_optimizer.nothing:Best"}, "needs the module pytorch_optimizer.nothing"),
        ({"name": "pytorch_optimizer:Lyon"}, "has no class 'Lyon'; did you mean 'Lion'"),
        ({"name": "torch.nn:Linear"}, "not a subclass of torch.optim.Optimizer"),
        ({"name": "math:pi"}, "not a subclass of torch.optim.Optimizer"),
        ({"name": "pytorch_optimizer:Lion", "settings": {"beta": 1}}, "does not take 'optimizer.settings.beta'; did"),
        (
            {"name": "pytorch_optimizer:Lion", "settings": {"zzz": 1}},
            "take 'optimizer.settings.zzz'; it takes",
        ),
        ({"name": "pytorch_optimizer:Lion", "settings": {"betas": [0.95, 0.98]}}, "optimizer.momentum is 0.9"),
        ({"name": "pytorch_optimizer:Lion", "settings": {"betas": [0.9, 2.0]}}, "could not be built: it raised"),
        ({"name": "pytorch_optimizer:Lion", "settings": {"betas": 3}}, "could not be built: it raised"),
        ({"name": "torch.optim:LBFGS"}, "could not be built: it raised"),
        ({"name": "torch.optim:Rprop"}, "has no weight decay; set optimizer.weight_decay to 0"),
    ],
)
def test_mistakes_are_one_line(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_optimizer(settings(**values), network())
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
