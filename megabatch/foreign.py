"""Code of others that a recipe names: `package.module:name` becomes the object, every mistake becomes one line."""

from __future__ import annotations

import importlib
from typing import Any

from megabatch.errors import ConfigError, first_line, nearest


def is_foreign_name(name: str) -> bool:
    """Whether the name has the form `package.module:name`."""
    module, _, member = name.partition(":")
    return member.isidentifier() and all(part.isidentifier() for part in module.split("."))


def load_foreign(what: str, name: str, kind: str) -> Any:
    """The object called `name`; `what` (model, optimizer) and `kind` (function, class) are for the messages.

    Raises:
        ConfigError: no such form, no such module or no such member, or a module that fails while it is imported.
    """
    if not is_foreign_name(name):
        raise ConfigError(f"{what} '{name}' is not of the form package.module:{kind}")
    module_name, _, member = name.partition(":")
    module = import_foreign(f"{what} '{name}'", module_name, "install it or put its folder on PYTHONPATH")
    if not hasattr(module, member):
        hint = nearest(member, vars(module))
        raise ConfigError(f"{what} '{name}': module {module_name} has no {kind} '{member}'{hint}")
    return getattr(module, member)


def import_foreign(wanted_by: str, module_name: str, remedy: str) -> Any:
    """The module, or a `ConfigError` that names who wanted it and, when it is not installed, the remedy."""
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # importing runs foreign code, which may raise anything
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            raise ConfigError(f"{wanted_by} needs the module {missing}, which is not installed; {remedy}") from error
        raise ConfigError(f"{wanted_by}: importing {module_name} raised {first_line(error)}") from error
