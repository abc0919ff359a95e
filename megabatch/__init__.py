"""Train image classifiers with extremely large minibatches on many workers.

Importing the package costs nothing: what needs torch is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megabatch.comm.allreduce import all_reduce as all_reduce
    from megabatch.comm.grid import ProcessGrid as ProcessGrid
    from megabatch.comm.hook import gradient_hook as gradient_hook
    from megabatch.config import Config as Config
    from megabatch.errors import MegabatchError as MegabatchError
    from megabatch.model.norm import GhostStatistics as GhostStatistics
    from megabatch.model.registry import build_model as build_model
    from megabatch.optim.groups import parameter_groups as parameter_groups
    from megabatch.recipes import load_config as load_config

__version__ = "0.1.0"

_PUBLIC = {
    "Config": "megabatch.config",
    "GhostStatistics": "megabatch.model.norm",
    "MegabatchError": "megabatch.errors",
    "ProcessGrid": "megabatch.comm.grid",
    "all_reduce": "megabatch.comm.allreduce",
    "build_model": "megabatch.model.registry",
    "gradient_hook": "megabatch.comm.hook",
    "load_config": "megabatch.recipes",
    "parameter_groups": "megabatch.optim.groups",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'megabatch' has no attribute '{name}'")
    return getattr(import_module(_PUBLIC[name]), name)
