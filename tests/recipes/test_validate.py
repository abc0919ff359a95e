"""A mistake in a table is one line that names the key; through whole recipes it is tested in test_recipes.py."""

from __future__ import annotations

from typing import Any

import pytest

from megabatch.errors import ConfigError
from megabatch.recipes.validate import validate

PROMISE = {"paper": "p", "hardware": "h", "time": "t", "accuracy": "a"}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"optimizer": {"lars": {"rule": "papr"}}}, "'optimizer.lars.rule' = 'papr' in here"),
        ({"optimizer": {"lars": {"role": "paper"}}}, "unknown key 'optimizer.lars.role' in here; did you mean 'rule'?"),
        ({"optimizer": {"rate_factor": -1}}, "'optimizer.rate_factor' = -1"),
        ({"promise": PROMISE | {"workers": 0}}, "'promise.workers' = 0"),
        ({"promise": {}}, "here lacks 'promise."),
    ],
)
def test_a_mistake_is_one_line(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate({"promise": PROMISE, **sections}, "here")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_sound_table_passes() -> None:
    assert validate({"promise": PROMISE}, "here").promise.paper == "p"
