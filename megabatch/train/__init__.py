"""Training: `megabatch.train(config)`, and what it is made of.

The folder and the call have the same name. Once anything in the folder is imported, Python binds the name to the
folder's module, so the module itself can be called.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megabatch.config import Config


class _CallableModule(ModuleType):
    def __call__(self, config: Config, **options: Any) -> dict[str, Any]:
        """See `megabatch.train.entry.train`."""
        from megabatch.train.entry import train

        return train(config, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        return import_module, (__name__,)  # so that a function which uses it can be sent to another process


sys.modules[__name__].__class__ = _CallableModule
