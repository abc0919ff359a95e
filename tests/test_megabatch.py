"""The package's public names: each leads to what it says, none is missing, an unknown one is refused."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

import megabatch


def test_every_public_name_can_be_had_and_is_the_thing_itself() -> None:
    for name, module in megabatch._PUBLIC.items():
        if name in megabatch._MODULES:
            assert getattr(megabatch, name) is import_module(module)
            continue
        assert getattr(megabatch, name) is getattr(import_module(module), name)
        assert name in import_module(module).__all__
    assert megabatch.schedules.value_at(megabatch.schedules.constant(0.1, until_epoch=2), 1.0) == 0.1
    assert set(megabatch.__all__) == {"__version__", *megabatch._PUBLIC}
    assert {name for name in dir(megabatch) if not name.startswith("__")} == set(megabatch._PUBLIC)
    assert {*megabatch.__all__, "__doc__", "__file__", "__path__"} <= set(dir(megabatch))


def test_type_checkers_see_the_same_names_from_the_same_places() -> None:
    assert megabatch.__file__ is not None
    tree = ast.parse(Path(megabatch.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == megabatch._PUBLIC | {"schedules": "megabatch.schedule", "train": "megabatch.train.entry"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        megabatch.nope  # noqa: B018
