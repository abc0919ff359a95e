"""The optimizer a recipe asks for, and the values it has at an epoch."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from megabatch.config import OptimizerConfig
from megabatch.errors import ConfigError, first_line, nearest
from megabatch.foreign import load_foreign
from megabatch.optim.eager import eager
from megabatch.optim.groups import parameter_groups, split_groups
from megabatch.optim.lamb import LAMB
from megabatch.optim.lars import LARS
from megabatch.optim.rmsprop_warmup import RMSpropWarmup, share_of
from megabatch.optim.shampoo import Shampoo
from megabatch.schedule.batch import Step
from megabatch.schedule.pieces import largest_value, value_at


def build_optimizer(
    settings: OptimizerConfig, model: nn.Module, *, head: nn.Module | None = None, backbone_lr_factor: float = 1.0
) -> torch.optim.Optimizer:
    """The optimizer with the values of epoch 0; batch-norm and biases in a group of their own.

    backbone_lr_factor: below 1, what is not in `head` learns slower by it, in further groups.
    """
    groups = parameter_groups(model, settings.decay_norm_and_bias)
    if head is not None and backbone_lr_factor != 1.0:
        if settings.name == "rmsprop_warmup":
            raise ConfigError(
                "model.backbone_lr_factor has no effect on the lr of rmsprop_warmup; leave it out, or use another one"
            )
        groups = split_groups(groups, head, backbone_lr_factor)
    values = scheduled_at(settings, 0.0)
    lr, momentum = values["lr"], values["momentum"]
    if settings.is_foreign:
        optimizer = _build_foreign(settings.name, groups, lr, momentum, settings.settings)
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
    # Fused kernels leave out a step on the device by themselves, see `skip`.
    kind: dict[str, Any] = {"fused": True} if groups[0]["params"][0].is_cuda else {"foreach": True}
    if settings.name == "adamw":
        return eager(torch.optim.AdamW)(groups, lr=lr, betas=betas, eps=eps, **kind)
    if settings.name == "nadamw":
        return eager(torch.optim.NAdam)(groups, lr=lr, betas=betas, eps=eps, decoupled_weight_decay=True, foreach=True)
    return eager(torch.optim.SGD)(groups, lr=lr, momentum=momentum, nesterov=settings.nesterov, **kind)


def _build_foreign(
    name: str, groups: list[dict[str, Any]], lr: float, momentum: float, settings: dict[str, Any]
) -> torch.optim.Optimizer:
    """The optimizer of class `name` over `groups`; `momentum` is what a `betas` among the settings must begin with.

    Raises:
        ConfigError: a module or class that is not there, a class that is no optimizer, settings it does not take.
    """
    kind = load_foreign("optimizer", name, "class")
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ConfigError(
            f"optimizer '{name}' is not a subclass of torch.optim.Optimizer; give the class of an optimizer"
        )
    known = _settings_of(kind)
    for setting in settings:
        if setting not in known:
            hint = nearest(setting, known) or f"; it takes {', '.join(sorted(known)) or 'none'}"
            raise ConfigError(f"optimizer '{name}' does not take 'optimizer.settings.{setting}'{hint}")
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    betas = given.get("betas")
    if isinstance(betas, tuple) and betas and betas[0] != momentum:
        raise ConfigError(
            f"optimizer.settings.betas begins with {betas[0]}, but optimizer.momentum is {momentum:g} and takes its "
            "place; give both the same value"
        )
    make: Any = kind  # every class has arguments of its own
    try:
        optimizer: torch.optim.Optimizer = make(groups, lr=lr, **given)
    except Exception as error:  # foreign code may raise anything
        raise ConfigError(
            f"optimizer '{name}' could not be built: it raised {first_line(error)}; see optimizer.settings"
        ) from error
    return optimizer


def _settings_of(kind: type[torch.optim.Optimizer]) -> list[str]:
    """The names that a class takes by name; what `**kwargs` would swallow unseen is none of them."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = list(inspect.signature(kind).parameters.values())
    return [p.name for p in parameters[1:] if p.kind in named and p.name not in ("lr", "momentum", "weight_decay")]


def scheduled_at(settings: OptimizerConfig, epoch: float) -> dict[str, float]:
    """The scheduled values at a fractional epoch."""
    return {
        "lr": value_at(settings.lr, epoch) * settings.lr_factor,
        "momentum": value_at(settings.momentum, epoch),
        "weight_decay": value_at(settings.weight_decay, epoch),
    }


def prepare_step(optimizer: torch.optim.Optimizer) -> None:
    """What an optimizer needs all ranks for, before the step that it makes next; every rank must call it."""
    if isinstance(optimizer, Shampoo):
        optimizer.gather_roots()


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
        group["lr"] = values["lr"] * group.get("lr_factor", 1.0)
        group["weight_decay"] = values["weight_decay"] * group["decay_factor"]
        if "betas" in group:  # Adam's first beta is what SGD calls momentum
            group["betas"] = (values["momentum"], *group["betas"][1:])
        else:
            group["momentum"] = values["momentum"]
    if isinstance(optimizer, RMSpropWarmup):
        optimizer.set_epoch(past_epochs + epoch)
        values["sgd_share"] = share_of(optimizer.param_groups[0])
    return values
