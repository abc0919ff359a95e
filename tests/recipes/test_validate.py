"""A mistake in a table is one line that names the key; through whole recipes it is tested in test_recipes.py."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from megabatch.config import Config
from megabatch.errors import ConfigError
from megabatch.recipes.validate import RENAMED, validate

REFERENCE = {"paper": "p", "hardware": "h", "time": "t", "accuracy": "a"}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"optimizer": {"lars": {"rule": "papr"}}}, "'optimizer.lars.rule' = 'papr' in here"),
        ({"optimizer": {"lars": {"role": "paper"}}}, "unknown key 'optimizer.lars.role' in here; did you mean 'rule'?"),
        ({"optimizer": {"lr_factor": -1}}, "'optimizer.lr_factor' = -1"),
        ({"reference": REFERENCE | {"workers": 0}}, "'reference.workers' = 0"),
        ({"reference": {}}, "here lacks 'reference."),
        (
            {"train": {"batch_total": 64}},
            "'train.batch_total' in here is now called 'train.global_batch_size'; rename it",
        ),
        ({"promise": REFERENCE}, "'promise' in here is now called 'reference'; rename it"),
        ({"norm": {"newest_share": 1.0}}, "'norm.newest_share' in here is now called 'norm.momentum'; rename it"),
    ],
)
def test_a_mistake_is_one_line(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate({"reference": REFERENCE, **sections}, "here")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_sound_table_passes() -> None:
    assert validate({"reference": REFERENCE}, "here").reference.paper == "p"


def test_every_new_name_is_a_setting() -> None:
    for new in RENAMED.values():
        section: Any = Config
        for name in new.split("."):
            field = section.model_fields[name]
            section = next(
                (one for one in (field.annotation, *get_args(field.annotation)) if hasattr(one, "model_fields")), None
            )
