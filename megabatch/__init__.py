"""Train image classifiers with extremely large minibatches on many workers.

Importing the package costs nothing: what needs torch is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megabatch.comm.exact import ExactSums as ExactSums
    from megabatch.comm.grid import ProcessGrid as ProcessGrid
    from megabatch.comm.hook import gradient_hook as gradient_hook
    from megabatch.comm.noise_scale import NoiseScale as NoiseScale
    from megabatch.comm.select import all_reduce as all_reduce
    from megabatch.config import Config as Config
    from megabatch.data.randomness import sample_stream as sample_stream
    from megabatch.errors import MegabatchError as MegabatchError
    from megabatch.model.average import WeightAverage as WeightAverage
    from megabatch.model.norm import GhostStatistics as GhostStatistics
    from megabatch.model.norm import exact_statistics as exact_statistics
    from megabatch.model.registry import build_model as build_model
    from megabatch.model.weights import average_weights as average_weights
    from megabatch.optim.groups import parameter_groups as parameter_groups
    from megabatch.optim.lamb import LAMB as LAMB
    from megabatch.optim.lars import LARS as LARS
    from megabatch.optim.rmsprop_warmup import RMSpropWarmup as RMSpropWarmup
    from megabatch.optim.shampoo import Shampoo as Shampoo
    from megabatch.recipes import load_config as load_config
    from megabatch.schedule import schedules as schedules
    from megabatch.schedule.control import BatchControl as BatchControl
    from megabatch.train.branch import branch as branch
    from megabatch.train.entry import train as train
    from megabatch.use.classifier import load as load

__version__ = "0.1.0"

_PUBLIC = {
    "BatchControl": "megabatch.schedule.control",
    "Config": "megabatch.config",
    "ExactSums": "megabatch.comm.exact",
    "GhostStatistics": "megabatch.model.norm",
    "LAMB": "megabatch.optim.lamb",
    "LARS": "megabatch.optim.lars",
    "MegabatchError": "megabatch.errors",
    "NoiseScale": "megabatch.comm.noise_scale",
    "ProcessGrid": "megabatch.comm.grid",
    "RMSpropWarmup": "megabatch.optim.rmsprop_warmup",
    "Shampoo": "megabatch.optim.shampoo",
    "WeightAverage": "megabatch.model.average",
    "all_reduce": "megabatch.comm.select",
    "average_weights": "megabatch.model.weights",
    "branch": "megabatch.train.branch",
    "build_model": "megabatch.model.registry",
    "exact_statistics": "megabatch.model.norm",
    "gradient_hook": "megabatch.comm.hook",
    "load": "megabatch.use.classifier",
    "load_config": "megabatch.recipes",
    "parameter_groups": "megabatch.optim.groups",
    "sample_stream": "megabatch.data.randomness",
    "schedules": "megabatch.schedule.schedules",
    "train": "megabatch.train",
}

_MODULES = ("schedules", "train")  # `megabatch.train(config)`: the module can be called

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'megabatch' has no attribute '{name}'")
    module = import_module(_PUBLIC[name])
    return module if name in _MODULES else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
