"""The optimizer a recipe asks for, and the values it has at an epoch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megabatch.config import OptimizerConfig
from megabatch.errors import ConfigError
from megabatch.optim.foreign import build_foreign
from megabatch.optim.groups import parameter_groups
from megabatch.optim.lamb import LAMB
from megabatch.optim.lars import LARS
from megabatch.optim.rmsprop_warmup import RMSpropWarmup, share_of
from megabatch.optim.shampoo import Shampoo
from megabatch.schedule.batch import Step
from megabatch.schedule.pieces import largest_value, value_at


def build_optimizer(settings: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer with the values of epoch 0; batch-norm and biases in a group of their own."""
    groups = parameter_groups(model, settings.decay_norm_and_bias)
    values = scheduled_at(settings, 0.0)
    lr, momentum = values["lr"], values["momentum"]
    if settings.is_foreign:
        optimizer = build_foreign(settings.name, groups, lr, momentum, settings.settings)
        if largest_value(settings.weight_decay) and "weight_decay" not in optimizer.param_groups[0]:
            raise ConfigError(f"optimizer '{settings.name}' has no weight decay; set optimizer.weight_decay to 0")
    else:
        optimizer = _build_known(settings, groups, lr, momentum)
    schedule_optimizer(optimizer, settings, 0.0)
    return optimizer


def _build_known(
    settings: OptimizerConfig, groups: list[dict[str, Any]], lr: float, momentum: float
) -> torch.optim.Optimizer:
    if settings.name == "lars":
        return LARS(groups, lr, momentum, nesterov=settings.nesterov, **settings.lars.model_dump())
    if settings.name == "lamb":
        lamb = settings.lamb
        return LAMB(groups, lr, (momentum, lamb.beta2), eps=lamb.eps, bias_correction=lamb.bias_correction)
    if settings.name == "shampoo":
        return Shampoo(groups, lr, momentum, nesterov=settings.nesterov, **settings.shampoo.model_dump())
    if settings.name == "rmsprop_warmup":
        options = settings.rmsprop_warmup.model_dump()
        return RMSpropWarmup(groups, lr, momentum, rmsprop_lr=options.pop("lr"), **options)
    betas, eps = (momentum, settings.adam.beta2), settings.adam.eps
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, lr, betas, eps, foreach=True)
    if settings.name == "nadamw":
        return torch.optim.NAdam(groups, lr, betas, eps, decoupled_weight_decay=True, foreach=True)
    return torch.optim.SGD(groups, lr, momentum, nesterov=settings.nesterov, foreach=True)


def scheduled_at(settings: OptimizerConfig, epoch: float) -> dict[str, float]:
    """The scheduled values at a fractional epoch."""
    return {
        "lr": value_at(settings.lr, epoch) * settings.lr_factor,
        "momentum": value_at(settings.momentum, epoch),
        "weight_decay": value_at(settings.weight_decay, epoch),
    }


def schedule_optimizer(
    optimizer: torch.optim.Optimizer,
    settings: OptimizerConfig,
    epoch: float,
    *,
    step: Step | None = None,
    past_epochs: float = 0.0,
) -> dict[str, float]:
    """Give the optimizer the values scheduled for this epoch, and return them for the log.

    step: keeps the noise scale by its rule when its batch has grown.
    past_epochs: training before epoch 0 of these schedules; a warm-up by RMSprop is not begun again in a branch.
    """
    values = scheduled_at(settings, epoch)
    if step is not None:
        values["lr"], values["momentum"] = step.keep_noise(values["lr"], values["momentum"])
    for group in optimizer.param_groups:
        group["lr"] = values["lr"]
        group["weight_decay"] = values["weight_decay"] * group["decay_factor"]
        if "betas" in group:  # Adam's first beta is what SGD calls momentum
            group["betas"] = (values["momentum"], *group["betas"][1:])
        else:
            group["momentum"] = values["momentum"]
    if isinstance(optimizer, RMSpropWarmup):
        optimizer.set_epoch(past_epochs + epoch)
        values["sgd_share"] = share_of(optimizer.param_groups[0])
    return values
