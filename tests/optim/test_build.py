"""A recipe's optimizer: the right kind, its settings, and the values of an epoch in every group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from pytorch_optimizer import SM3, Lion
from torch import nn

from megabatch.config import OptimizerConfig
from megabatch.errors import ConfigError
from megabatch.optim.build import build_optimizer, schedule_optimizer, scheduled_at
from megabatch.optim.lamb import LAMB
from megabatch.optim.lars import LARS
from megabatch.optim.rmsprop_warmup import RMSpropWarmup

RATE = [{"until_epoch": 2, "shape": "linear", "start": 1.0, "end": 3.0}, {"until_epoch": 4, "start": 0.5}]
DECAY = [{"until_epoch": 3, "start": 0.1}, {"until_epoch": 4, "start": 0.2}]


def settings(**values: Any) -> OptimizerConfig:
    return OptimizerConfig.model_validate({"lr": RATE, "weight_decay": DECAY, **values})


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sgd", torch.optim.SGD),
        ("lars", LARS),
        ("lamb", LAMB),
        ("rmsprop_warmup", RMSpropWarmup),
        ("adamw", torch.optim.AdamW),
        ("nadamw", torch.optim.NAdam),
    ],
)
def test_every_group_has_the_values_of_the_epoch(name: str, kind: type) -> None:
    chosen = settings(name=name, lr_factor=0.5)
    optimizer = build_optimizer(chosen, network())
    assert type(optimizer) is kind
    for epoch, lr, decay in ((0.0, 0.5, 0.1), (1.0, 1.0, 0.1), (3.5, 0.25, 0.2)):
        rates = schedule_optimizer(optimizer, chosen, epoch)
        assert (rates["lr"], rates["momentum"], rates["weight_decay"]) == (lr, 0.9, decay)
        momenta = [g["betas"][0] if "betas" in g else g["momentum"] for g in optimizer.param_groups]
        assert momenta == [0.9, 0.9]
        assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(lr, decay), (lr, 0.0)]
        assert scheduled_at(chosen, epoch)["lr"] == lr


def test_the_settings_of_lars_reach_it() -> None:
    lars = {"rule": "trust_outside", "trust_coefficient": 0.02, "eps": 1e-6, "clip": True}
    optimizer = build_optimizer(settings(name="lars", nesterov=True, lars=lars), network())
    for group, adapted in zip(optimizer.param_groups, (True, False), strict=True):
        assert {key: group[key] for key in lars} == lars
        assert (group["nesterov"], group["lars"]) == (True, adapted)


def test_the_settings_of_lamb_and_adam_reach_them() -> None:
    lamb = {"beta2": 0.95, "eps": 1e-5, "bias_correction": False}
    optimizer = build_optimizer(settings(name="lamb", momentum=0.8, lamb=lamb), network())
    for group, adapted in zip(optimizer.param_groups, (True, False), strict=True):
        assert (group["betas"], group["eps"], group["bias_correction"]) == ((0.8, 0.95), 1e-5, False)
        assert group["lars"] == adapted
    for name in ("adamw", "nadamw"):
        optimizer = build_optimizer(settings(name=name, adam={"beta2": 0.95, "eps": 1e-5}), network())
        assert (optimizer.param_groups[0]["betas"], optimizer.param_groups[0]["eps"]) == ((0.9, 0.95), 1e-5)
        assert optimizer.param_groups[0]["decoupled_weight_decay"] is True


def test_the_settings_of_rmsprop_warmup_reach_it_and_its_share_is_logged() -> None:
    chosen = settings(name="rmsprop_warmup", rmsprop_warmup={"center_epoch": 2, "period_epochs": 2, "lr": 1e-3})
    optimizer = build_optimizer(chosen, network())
    assert optimizer.param_groups[0]["rmsprop_lr"] == 1e-3
    assert [schedule_optimizer(optimizer, chosen, epoch)["sgd_share"] for epoch in (2.0, 2.5, 3.0)] == [0.5, 0.75, 1.0]
    assert optimizer.param_groups[1]["epoch"] == 3.0


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lr": [RATE[1], RATE[0]]}, r"optimizer\.lr must have rising"),
        ({"weight_decay": []}, r"optimizer\.weight_decay must have rising"),
        ({"lr": -0.1}, "greater than or equal to 0"),
        ({"lr_factor": -1}, "greater than or equal to 0"),
        ({"momentum": 1.0}, r"optimizer\.momentum 1 never forgets"),
        ({"name": "rmsprop_warmup", "nesterov": True}, "not part of rmsprop_warmup"),
        ({"lars": {"rule": "mine"}}, "paper"),
        ({"name": "lamb", "nesterov": True}, "not part of lamb"),
        ({"name": "lam"}, r"'lam' is not known; did you mean 'lamb'\?; choose one of sgd, lars, lamb"),
        ({"name": "two words:Class"}, "not of the form package.module:Class"),
        ({"name": "package:a.b"}, "not of the form package.module:Class"),
        ({"settings": {"foreach": True}}, "optimizer.settings are those of a package.module:Class"),
        ({"name": "a.b:C", "settings": {"lr": 1}}, "optimizer.settings.lr would be overwritten; set optimizer.lr"),
        ({"lamb": {"beta2": 1}}, "less than 1"),
        ({"clip_norm": -1}, "greater than or equal to 0"),
        ({"lars": {"trust_coefficient": 0}}, "greater than 0"),
        ({"rmsprop_warmup": {"smoothing": 1}}, "less than 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises((ValidationError, ConfigError), match=said):
        settings(**values)


def foreign(name: str, **values: Any) -> OptimizerConfig:
    return settings(name=name, **{"lr": 0.5, "weight_decay": 1e-4, **values})


def test_settings_reach_an_optimizer_from_elsewhere_and_schedules_move_it() -> None:
    falling = [{"until_epoch": 2, "shape": "linear", "start": 0.9, "end": 0.5}]
    given = {"betas": [0.9, 0.98], "weight_decouple": False}
    chosen = foreign("pytorch_optimizer:Lion", momentum=falling, settings=given)
    optimizer = build_optimizer(chosen, network())
    assert isinstance(optimizer, Lion)
    schedule_optimizer(optimizer, chosen, 1.0)
    for group, decay in zip(optimizer.param_groups, (1e-4, 0.0), strict=True):
        assert (group["lr"], group["weight_decay"], group["weight_decouple"]) == (0.5, decay, False)
        assert group["betas"] == (pytest.approx(0.7), 0.98)


def test_momentum_goes_where_there_are_no_betas() -> None:
    chosen = foreign("pytorch_optimizer:SM3", momentum=0.3, weight_decay=0)
    optimizer = build_optimizer(chosen, network())
    assert isinstance(optimizer, SM3)
    assert [group["momentum"] for group in optimizer.param_groups] == [0.3, 0.3]


def test_a_step_is_the_one_of_the_class_itself() -> None:
    torch.manual_seed(1)
    model, twin = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)
    twin.load_state_dict(model.state_dict())
    model.weight.grad = torch.randn(3, 4)
    twin.weight.grad = model.weight.grad.clone()
    build_optimizer(foreign("pytorch_optimizer:Lion", lr=0.01, weight_decay=0.2), model).step()
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
def test_mistakes_about_an_optimizer_from_elsewhere_are_one_line(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_optimizer(foreign(**values), network())
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
