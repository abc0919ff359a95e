"""A recipe's optimizer: the right kind, its settings, and the values of an epoch in every group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
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
