"""Settings: typed, frozen, unknown keys refused, values that cannot work refused, written and read back equal."""

from __future__ import annotations

import tomllib
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from megabatch.comm.phases import ALGORITHMS
from megabatch.config import CommConfig, Config, TrainConfig, differences
from megabatch.errors import ConfigError
from megabatch.schedule.pieces import Piece

REFERENCE = {"paper": "none", "hardware": "any", "time": "soon", "accuracy": "some"}


def config(**sections: Any) -> Config:
    return Config.model_validate({"reference": REFERENCE, **sections})


def complaint(**sections: Any) -> str:
    with pytest.raises((ValidationError, ConfigError)) as caught:
        config(**sections)
    return str(caught.value)


def test_a_config_cannot_be_changed() -> None:
    made = config()
    with pytest.raises(ValidationError, match="frozen"):
        made.train = TrainConfig()
    with pytest.raises(ValidationError, match="frozen"):
        made.train.epochs = 3


@pytest.mark.parametrize(
    "sections",
    [
        {"trian": {}},
        {"train": {"epoch": 3}},
        {"data": {"augment": {"flop": True}}},
        {"optimizer": {"lr": [{"until_epoch": 1, "start": 0.1, "finish": 3}]}},
    ],
)
def test_unknown_keys_are_refused_at_every_depth(sections: dict[str, Any]) -> None:
    assert "Extra inputs are not permitted" in complaint(**sections)


def test_a_reference_is_optional() -> None:
    assert Config.model_validate({}).reference.accuracy == "not stated"


BAD_VALUES: list[tuple[str, str, Any]] = [
    ("train", "epochs", 0),
    ("train", "epochs", float("inf")),
    ("train", "epochs", float("nan")),
    ("train", "seed", -1),
    ("train", "seed", 2**63),
    ("train", "ghost_batch_size", 1),
    ("train", "global_batch_size", 0),
    ("train", "global_batch_size", "many"),
    ("train", "global_batch_size", "5:1024"),
    ("train", "global_batch_size", "0:1024 nan:2048"),
    ("train", "label_smoothing", 1.0),
    ("train", "label_smoothing", float("nan")),
    ("train", "precision", "fp8"),
    ("train", "evaluate_every_epochs", -1),
    ("train", "max_steps", -1),
    ("norm", "momentum", 0),
    ("norm", "momentum", 1.5),
    ("data", "image_size", 7),
    ("data", "std", [0.0]),
    ("data", "mean", []),
    ("checkpoint", "keep", 1),
    ("checkpoint", "every_epochs", float("inf")),
    ("comm", "backend", "mpi"),
    ("comm", "algorithm", "tree"),
    ("comm", "grad_dtype", "fp8"),
    ("comm", "bucket_mb", 0),
    ("comm", "bucket_mb", float("inf")),
    ("comm", "timeout_seconds", 0),
    ("comm", "timeout_seconds", float("inf")),
    ("comm", "max_restarts", -1),
    ("optimizer", "lr", -0.1),
    ("optimizer", "lr", float("nan")),
    ("optimizer", "lr", []),
    ("optimizer", "name", "adam"),
]


@pytest.mark.parametrize(("section", "key", "value"), BAD_VALUES, ids=[f"{s}.{k}={v}" for s, k, v in BAD_VALUES])
def test_a_value_that_cannot_work_is_refused(section: str, key: str, value: Any) -> None:
    assert complaint(**{section: {key: value}})


@pytest.mark.parametrize(("global_batch_size", "fit"), [(1000, "960, 1024"), (65, "64, 128"), (10, "64, 128")])
def test_a_batch_must_be_whole_ghosts_and_the_nearest_are_named(global_batch_size: int, fit: str) -> None:
    said = complaint(train={"global_batch_size": global_batch_size, "ghost_batch_size": 64})
    assert f"train.global_batch_size {global_batch_size} is not a multiple of train.ghost_batch_size 64" in said
    assert f"nearest that fit: {fit}" in said


def test_every_stage_of_a_batch_must_be_whole_ghosts() -> None:
    assert "2000 is not a multiple" in complaint(train={"global_batch_size": "0:1024 2:2000", "ghost_batch_size": 32})
    assert (
        config(train={"global_batch_size": "0:1024 2:2048", "ghost_batch_size": 32}).train.global_batch_size
        == "0:1024 2:2048"
    )


def test_pieces_must_rise() -> None:
    pieces = [{"until_epoch": 2, "start": 0.1}, {"until_epoch": 2, "start": 0.2}]
    assert "rising until_epoch" in complaint(optimizer={"momentum": pieces})
    assert "rising until_epoch" in complaint(optimizer={"weight_decay": pieces[::-1] + pieces[:1]})


def test_mean_and_std_pair_up() -> None:
    assert "give as many of each" in complaint(data={"mean": [0.5], "std": [0.5, 0.5]})


def test_every_algorithm_there_is_can_be_chosen_and_no_other() -> None:
    """The settings know the algorithms by name only: they stand below the code that has them."""
    assert set(get_args(CommConfig.model_fields["algorithm"].annotation)) == {"auto", *ALGORITHMS}


def test_nesterov_needs_momentum() -> None:
    """torch refuses Nesterov without momentum when the optimizer is built, which is far too late to be told."""
    assert "nesterov" in complaint(optimizer={"nesterov": True, "momentum": 0.0})


def test_rmsprop_warmup_needs_a_rate_from_the_start() -> None:
    warmup = [{"until_epoch": 5, "shape": "linear", "start": 0.0, "end": 6.4}]
    assert "begins with 0" in complaint(optimizer={"name": "rmsprop_warmup", "lr": warmup})


def rich_config() -> Config:
    return config(
        data={"source": "folder", "path": 'a "strange" path \\ with everything', "mean": [0.5], "std": [0.25]},
        model={"name": "resnet8", "width": 12},
        train={"global_batch_size": "0:1024 2.5:2048", "ghost_batch_size": 64, "epochs": 4.5, "seed": 2**63 - 1},
        optimizer={
            "lr": [
                {"until_epoch": 1, "shape": "linear", "start": 0.05, "end": 0.8},
                {"until_epoch": 3, "start": 0.8},
                {"until_epoch": 4.5, "shape": "polynomial", "start": 0.8, "end": 0.0, "power": 2},
            ]
        },
    )


def test_toml_reads_back_equal() -> None:
    for original in (config(), rich_config()):
        again = Config.model_validate(tomllib.loads(original.to_toml()))
        assert again == original
        assert again.to_toml() == original.to_toml()
    assert rich_config().optimizer.lr[1] == Piece(until_epoch=3, start=0.8)  # type: ignore[index]


def test_differences_are_dotted_names_with_both_values() -> None:
    one = rich_config()
    assert differences(one, one) == {}
    other = one.model_copy(
        update={
            "model": one.model.model_copy(update={"width": None}),
            "train": one.train.model_copy(update={"seed": 3}),
            "optimizer": one.optimizer.model_copy(update={"lr": 0.1}),
        }
    )
    found = differences(one, other)
    assert list(found) == ["model.width", "optimizer.lr", "train.seed"]
    assert found["model.width"] == (12, None)
    assert found["train.seed"] == (2**63 - 1, 3)
    assert found["optimizer.lr"][1] == 0.1
    assert differences(other, one)["train.seed"] == (3, 2**63 - 1)


COLLAPSE = {"at_epochs": [37, 52, 67], "epochs": 5}


def test_a_collapse_is_read_and_written_back_equal() -> None:
    made = config(train={"epochs": 67}, collapse={**COLLAPSE, "lr": 0.143, "weight_decay": 2e-4})
    assert made.collapse is not None
    assert made.collapse.at_epochs == (37.0, 52.0, 67.0)
    assert Config.model_validate(tomllib.loads(made.to_toml())) == made
    assert config().collapse is None


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"train": {"epochs": 60}, "collapse": COLLAPSE}, "has 67, but the trunk ends at train.epochs 60"),
        ({"train": {"epochs": 4}, "collapse": {"at_epochs": [4]}}, "collapse.epochs 5 is longer than the run"),
        ({"collapse": {"at_epochs": [52, 37]}}, "must rise"),
        ({"collapse": {"at_epochs": [37, 37]}}, "must rise"),
        ({"collapse": {"at_epochs": []}}, "at_epochs"),
        ({"collapse": {"at_epochs": [0]}}, "greater than 0"),
        ({"collapse": {"epochs": 2}}, "at_epochs"),
        ({"collapse": {**COLLAPSE, "lr": -0.1}}, "greater than or equal to 0"),
        (
            {"collapse": {**COLLAPSE, "lr": [{"until_epoch": 2, "start": -0.1}]}},
            "greater than or equal to 0",
        ),
        ({"collapse": {**COLLAPSE, "momentum": 1.0}}, "collapse.momentum 1 never forgets"),
        (
            {
                "train": {"global_batch_size": "0:256 3:512 6:16", "ghost_batch_size": 16},
                "batch_control": {"noise_rule": "momentum"},
            },
            "a batch of 0.0625 times the first stage needs momentum -0.6",
        ),
        ({"collapse": {**COLLAPSE, "global_batch_size": 100}}, "collapse.global_batch_size 100 is not a multiple"),
        ({"train": {"reset_momentum_at_epochs": [3, 2]}}, "reset_momentum_at_epochs must rise"),
        ({"train": {"reset_momentum_at_epochs": [90]}}, "between 0 and train.epochs 90"),
        ({"train": {"global_batch_size": 32}, "batch_control": {"measure_every_steps": 1}}, "give at least two"),
        (
            {
                "train": {"global_batch_size": "0:256 3:512"},
                "batch_control": {"adaptive": {"max_global_batch_size": 1024}},
            },
            "2 stages",
        ),
        ({"batch_control": {"adaptive": {"max_global_batch_size": 128}}}, "at least train.global_batch_size 256"),
        ({"batch_control": {"adaptive": {"max_global_batch_size": 1000}}}, "a multiple of train.ghost_batch_size 32"),
        ({"batch_control": {"adaptive": {"max_global_batch_size": 512, "growth": 1}}}, "greater than 1"),
        ({"train": {"global_batch_size": "0:32 3:1048576"}}, "a step of 32,768 ghost batches; exact sums hold at most"),
        (
            {"batch_control": {"adaptive": {"max_global_batch_size": 2**20}}},
            "a step of 32,768 ghost batches; exact sums hold at most",
        ),
        ({"collapse": {**COLLAPSE, "global_batch_size": 2**20}}, "a step of 32,768 ghost batches"),
    ],
)
def test_branches_and_batch_control_that_cannot_work_are_refused(sections: dict[str, Any], said: str) -> None:
    assert said in complaint(**sections)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"crop": "random"}, "'none', 'pad' or 'resized'"),
        ({"padding": -1}, "greater than or equal to 0"),
        ({"area_min": 0.0}, "greater than 0"),
        ({"area_max": 1.1}, "less than or equal to 1"),
        ({"area_min": 0.6, "area_max": 0.5}, "area is 0.6 to 0.5; it must be a rising range"),
        ({"area_min": float("nan")}, "data.augment.area_min"),
        ({"aspect_min": 0.0}, "greater than 0"),
        ({"aspect_min": 2.0}, "aspect is 2 to 1.33333; it must be a rising range"),
        ({"aspect_max": float("inf")}, "finite number"),
    ],
)
def test_wrong_augmentation(wrong: dict[str, Any], message: str) -> None:
    assert message in complaint(data={"augment": wrong})
