"""`build_model`: a model by name, from this package, from timm or from anybody's own code.

    "resnet50"                  built in; `known_models()` lists them
    "timm:convnext_tiny"        timm.create_model, an optional extra; imported only when asked for
    "package.module:function"   called with num_classes= and in_channels=, returns an nn.Module

A setting without effect is never silent. `width` belongs to the small built-in networks and is refused
elsewhere. A model that is not built in keeps its own initialisation, so the only policy that is true of it is
zero_gamma="none". The default "every_block" warns, because it cannot be told apart from a recipe that never
mentioned it; "last_block_of_stage", which somebody must have asked for, is refused.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable

from torch import nn

from megabatch.errors import ConfigError, first_line, nearest
from megabatch.foreign import import_foreign, load_foreign
from megabatch.model.resnet import ZeroGamma, check_zero_gamma, resnet18, resnet34, resnet50, resnet101, resnet152
from megabatch.model.small import resnet8, resnet20, resnet44

__all__ = ["build_model", "known_models"]

_SMALL = {"resnet8": resnet8, "resnet20": resnet20, "resnet44": resnet44}
_LARGE = {
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "resnet101": resnet101,
    "resnet152": resnet152,
}


def known_models() -> tuple[str, ...]:
    """The names of the built-in models, smallest first."""
    return (*_SMALL, *_LARGE)


def build_model(
    name: str, *, num_classes: int, in_channels: int, zero_gamma: ZeroGamma = "every_block", width: int | None = None
) -> nn.Module:
    """The model called `name`, freshly initialised from torch's random numbers.

    `width` is the number of channels of a small network's first stage; None is the network's own default.

    Raises:
        ConfigError: the name leads nowhere, or a setting cannot work with this model.
    """
    for setting, value in (("num_classes", num_classes), ("in_channels", in_channels), ("width", width)):
        if value is not None and value < 1:
            raise ConfigError(f"{setting} is {value}; a model needs at least 1")
    check_zero_gamma(zero_gamma)
    if ":" not in name and name not in known_models():
        raise ConfigError(
            f"model {name!r} is unknown{nearest(name, known_models())} "
            f"(built in: {', '.join(known_models())}; others: timm:NAME or package.module:function)"
        )
    if name in _SMALL:
        small, own_width = _SMALL[name], {} if width is None else {"width": width}
        return small(num_classes=num_classes, in_channels=in_channels, zero_gamma=zero_gamma, **own_width)
    if width is not None:
        raise ConfigError(f"width={width} has no effect on model {name!r}; leave it out or use {' or '.join(_SMALL)}")
    if name in _LARGE:
        return _LARGE[name](num_classes=num_classes, in_channels=in_channels, zero_gamma=zero_gamma)
    _check_foreign_zero_gamma(name, zero_gamma)
    if name.startswith("timm:"):
        return _from_timm(name.removeprefix("timm:"), num_classes=num_classes, in_channels=in_channels)
    return _from_function(name, {"num_classes": num_classes, "in_channels": in_channels})


def _check_foreign_zero_gamma(name: str, zero_gamma: ZeroGamma) -> None:
    remedy = f"has no effect on {name!r}, which keeps its own initialisation; set zero_gamma to 'none'"
    if zero_gamma == "last_block_of_stage":
        raise ConfigError(f"zero_gamma={zero_gamma!r} {remedy}")
    if zero_gamma == "every_block":
        warnings.warn(f"zero_gamma={zero_gamma!r} {remedy}", UserWarning, stacklevel=3)


def _from_timm(name: str, *, num_classes: int, in_channels: int) -> nn.Module:
    timm = import_foreign(f"model 'timm:{name}'", "timm", "run pip install megabatch[timm]")
    try:
        model = timm.create_model(name, pretrained=False, num_classes=num_classes, in_chans=in_channels)
    except Exception as error:
        # timm raises RuntimeError for a name it does not have, and whatever the model itself raises.
        known = timm.list_models()
        architecture = name.partition(".")[0]  # what follows the dot names pretrained weights
        hint = "" if architecture in known else nearest(architecture, known)
        raise ConfigError(f"timm cannot build {name!r} ({first_line(error)}){hint}") from error
    return _checked(model, f"timm:{name}")


def _from_function(name: str, sizes: dict[str, int]) -> nn.Module:
    function = load_foreign("model", name, "function")
    if not callable(function):
        raise ConfigError(f"model {name!r} is of type {type(function).__name__}; it must be a function or a class")
    if not _accepts(function, sizes):
        raise ConfigError(f"model {name!r} cannot be called with num_classes= and in_channels= alone")
    try:
        model = function(**sizes)
    except Exception as error:
        raise ConfigError(f"model {name!r} could not be built: it raised {first_line(error)}") from error
    return _checked(model, name)


def _accepts(function: Callable[..., object], arguments: dict[str, int]) -> bool:
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError:
        return False
    except ValueError:  # a callable without a signature, such as one written in C: only calling it can tell
        return True
    return True


def _checked(model: object, name: str) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model {name!r} returned {type(model).__name__}, it must return a torch.nn.Module")
    return model
