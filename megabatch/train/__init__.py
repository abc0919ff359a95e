"""Training: `megabatch.train(config)`, and what it is made of.

The folder and the call have the same name. Once anything in the folder is imported, Python binds the name to the
folder's module, so the module itself can be called.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> dict[str, Any]:
        from megabatch.train.entry import train

        return train(*args, **options)


sys.modules[__name__].__class__ = _CallableModule
