"""Names of other people's code: the object behind a good one, one line for a bad one."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest

from megabatch.errors import ConfigError
from megabatch.foreign import import_foreign, is_foreign_name, load_foreign


def test_a_name_leads_to_its_object() -> None:
    assert load_foreign("model", "collections:OrderedDict", "class") is collections.OrderedDict
    assert import_foreign("model 'x'", "os.path", "install it").join("a", "b") == str(Path("a", "b"))


@pytest.mark.parametrize("name", ["", "collections", "collections:", ":Counter", "..a:b", "a:b:c", "a b:c", "a:1"])
def test_other_forms_are_refused(name: str) -> None:
    assert not is_foreign_name(name)
    with pytest.raises(ConfigError, match=r"^model '.*' is not of the form package\.module:function$"):
        load_foreign("model", name, "function")


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'collections:Countre': module collections has no class 'Countre'; did you"):
        load_foreign("model", "collections:Countre", "class")
    with pytest.raises(ConfigError, match=r"^model 'x' needs the module nobody_has, which is not installed; buy it$"):
        import_foreign("model 'x'", "nobody_has.this", "buy it")
