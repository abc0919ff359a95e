"""Overrides and checks of plain tables; through whole recipes they are tested in test_recipes.py."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from megabatch.config import Config
from megabatch.errors import ConfigError
from megabatch.recipes.validate import RENAMED, apply_override, validate

REFERENCE = {"paper": "p", "hardware": "h", "time": "t", "accuracy": "a"}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"optimizer": {"lars": {"rule": "papr"}}}, "'optimizer.lars.rule' = 'papr' in here"),
        ({"optimizer": {"lars": {"role": "paper"}}}, "unknown key 'optimizer.lars.role' in here; did you mean 'rule'?"),
        ({"optimizer": {"lr_factor": -1}}, "'optimizer.lr_factor' = -1"),
        ({"reference": REFERENCE | {"workers": 0}}, "'reference.workers' = 0"),
        ({"reference": {"papr": "x"}}, "unknown key 'reference.papr' in here; did you mean 'paper'?"),
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


def test_all_mistakes_are_said_at_once() -> None:
    table = {
        "reference": {"papr": "p"},
        "train": {"epochs": "many", "sed": 3},
        "optimizer": {"lr": [{"until_epoch": 1, "shape": "straight", "start": 0.1}, {"start": "x", "until_epoch": 2}]},
    }
    with pytest.raises(ConfigError) as caught:
        validate(table, "here")
    said = str(caught.value)
    assert said.startswith("5 mistakes: (1) ")
    assert "\n" not in said
    for one in (
        "unknown key 'reference.papr' in here; did you mean 'paper'?",
        "'train.epochs' = 'many' in here",
        "unknown key 'train.sed' in here; did you mean 'seed'?",
        "'optimizer.lr.0.shape' = 'straight' in here",
        "'optimizer.lr.1.start' = 'x' in here",
    ):
        assert one in said


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "train.batch_total=64",
            "--set train.batch_total: 'train.batch_total' is now called 'train.global_batch_size'",
        ),
        ("optimizer.learning_rate.0.start=1", "'optimizer.learning_rate' is now called 'optimizer.lr'; use that name"),
        ("promise.pictures=3", "'promise.pictures' is now called 'reference.images'"),
    ],
)
def test_an_override_of_a_renamed_setting_is_refused_with_the_new_name(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_override({"optimizer": {"lr": 0.1}}, override)
    assert said in str(caught.value)


def test_a_sound_table_passes() -> None:
    assert validate({"reference": REFERENCE}, "here").reference.paper == "p"


def test_every_new_name_is_a_setting() -> None:
    for new in RENAMED.values():
        section: Any = Config
        for name in new.split("."):
            assert name in section.model_fields, f"'{new}' is no setting"
            field = section.model_fields[name]
            section = next(
                (one for one in (field.annotation, *get_args(field.annotation)) if hasattr(one, "model_fields")), None
            )


def test_a_new_section_is_made_and_a_list_entry_replaced() -> None:
    table: dict[str, Any] = {"a": [1, {"b": 2}]}
    for override in ("new.section.key=true", "a.0=[3, 4]", "a.1.b=x y"):
        apply_override(table, override)
    assert table == {"a": [[3, 4], {"b": "x y"}], "new": {"section": {"key": True}}}


@pytest.mark.parametrize("override", ["a", "=1", "a..b=1", "a.2=1", "a.0.b=1"])
def test_what_cannot_be_read_or_placed_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        apply_override({"a": [1, 2]}, override)
