"""The optimizer a recipe asks for, and the values it has at an epoch."""

from __future__ import annotations

import torch
from torch import nn

from megabatch.config import OptimizerConfig
from megabatch.optim.groups import parameter_groups
from megabatch.optim.lars import LARS
from megabatch.optim.rmsprop_warmup import RMSpropWarmup, share_of
from megabatch.schedule.batch import Step
from megabatch.schedule.pieces import value_at


def build_optimizer(settings: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer with the values of epoch 0; batch-norm and biases in a group of their own."""
    groups = parameter_groups(model, settings.decay_norm_and_bias)
    values = scheduled_at(settings, 0.0)
    lr, momentum = values["lr"], values["momentum"]
    optimizer: torch.optim.Optimizer
    if settings.name == "lars":
        optimizer = LARS(groups, lr, momentum, nesterov=settings.nesterov, **settings.lars.model_dump())
    elif settings.name == "rmsprop_warmup":
        options = settings.rmsprop_warmup.model_dump()
        optimizer = RMSpropWarmup(groups, lr, momentum, rmsprop_lr=options.pop("lr"), **options)
    else:
        optimizer = torch.optim.SGD(groups, lr, momentum, nesterov=settings.nesterov, foreach=True)
    schedule_optimizer(optimizer, settings, 0.0)
    return optimizer


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
        group["momentum"] = values["momentum"]
        group["weight_decay"] = values["weight_decay"] * group["decay_factor"]
    if isinstance(optimizer, RMSpropWarmup):
        optimizer.set_epoch(past_epochs + epoch)
        values["sgd_share"] = share_of(optimizer.param_groups[0])
    return values
