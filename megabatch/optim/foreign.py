"""An optimizer from elsewhere: `optimizer.name = "package.module:Class"`, with its own settings."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch

from megabatch.errors import ConfigError, nearest


def build_foreign(
    name: str, groups: list[dict[str, Any]], lr: float, momentum: float, settings: dict[str, Any]
) -> torch.optim.Optimizer:
    """The optimizer of class `name` over `groups`; `momentum` is what a `betas` among the settings must begin with.

    Raises:
        ConfigError: a module or class that is not there, a class that is no optimizer, settings it does not take.
    """
    kind: Any = _class_of(name)  # every class has arguments of its own
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
    try:
        optimizer: torch.optim.Optimizer = kind(groups, lr=lr, **given)
    except Exception as error:  # foreign code may raise anything
        raise ConfigError(
            f"optimizer '{name}' could not be built: it raised {_one_line(error)}; see optimizer.settings"
        ) from error
    return optimizer


def _class_of(name: str) -> type[torch.optim.Optimizer]:
    module_name, _, class_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            raise ConfigError(
                f"optimizer '{name}' needs the module {missing}, which is not installed; install it or put its folder "
                "on PYTHONPATH"
            ) from error
        raise ConfigError(f"optimizer '{name}': importing {module_name} raised {_one_line(error)}") from error
    found = getattr(module, class_name, None)
    if found is None:
        raise ConfigError(
            f"optimizer '{name}': module {module_name} has no class '{class_name}'{nearest(class_name, vars(module))}"
        )
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ConfigError(
            f"optimizer '{name}' is not a subclass of torch.optim.Optimizer; give the class of an optimizer"
        )
    return found


def _settings_of(kind: type[torch.optim.Optimizer]) -> list[str]:
    """The names that a class takes by name; what `**kwargs` would swallow unseen is none of them."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = list(inspect.signature(kind).parameters.values())
    return [p.name for p in parameters[1:] if p.kind in named and p.name not in ("lr", "momentum", "weight_decay")]


def _one_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
