"""Overrides on a plain table; through whole recipes they are tested in test_recipes.py."""

from __future__ import annotations

from typing import Any

import pytest

from megabatch.errors import ConfigError
from megabatch.recipes.overrides import apply_override


def test_a_new_section_is_made_and_a_list_entry_replaced() -> None:
    table: dict[str, Any] = {"a": [1, {"b": 2}]}
    for override in ("new.section.key=true", "a.0=[3, 4]", "a.1.b=x y"):
        apply_override(table, override)
    assert table == {"a": [[3, 4], {"b": "x y"}], "new": {"section": {"key": True}}}


@pytest.mark.parametrize("override", ["a", "=1", "a..b=1", "a.2=1", "a.0.b=1"])
def test_what_cannot_be_read_or_placed_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        apply_override({"a": [1, 2]}, override)
