"""Plan files: they go out and come back."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from megabatch.config import Config
from megabatch.errors import ConfigError
from megabatch.plan.convergence import ConvergenceLaw, mlperf_law
from megabatch.plan.estimate import Estimator
from megabatch.plan.plan_file import follow, plan_as_data, read_plan
from megabatch.plan.search import Goal, PlanResult, Space, plan
from megabatch.plan.workload import Workload, model_layers, workload_of
from megabatch.recipes import load_config
from megabatch.schedule.batch import BatchStages, first_sample, parse_stages
from tests.plan.laboratory import laboratory, workload


def test_a_plan_comes_back_as_overrides(tmp_path: Path) -> None:
    load = workload("0:32768 30:65536")
    result = plan(Estimator(laboratory(), load), [64, 256], Goal())
    data = plan_as_data(result, "laboratory")
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    back = read_plan(path)
    assert (back.recipe, back.workers, back.grid) == ("test", 256, result.chosen.candidate.grid.text)
    assert 'train.global_batch_size="0:32768 30:65536"' in back.overrides
    assert f'comm.algorithm="{result.chosen.candidate.algorithm}"' in back.overrides
    assert back.prediction["step_seconds"]["middle"] == result.chosen.step.middle
    assert len(data["candidates"]) == len(result.candidates)
    assert data["candidates"][data["front"][0]]["workers"] == result.front[0].candidate.workers


def own_batch(result: PlanResult, load: Workload) -> PlanResult:
    """The plan as if the recipe's own stages had been chosen."""
    own = next(one for one in result.candidates if one.batch == str(load.stages_over(one.epochs.middle)))
    return dataclasses.replace(result, load=load, chosen=own)


def written(path: Path, recipe: str, *, workers: int = 64, law: bool = False, **typed: Any) -> PlanResult:
    """A plan of a recipe as `megabatch plan` writes it."""
    typed.setdefault("overrides", [])
    layers = model_layers("resnet50")[0]
    load = workload_of(recipe, typed["overrides"], layers, scale=typed.get("scale"), epochs=typed.get("epochs"))
    load = dataclasses.replace(load, model="resnet50")
    result = own_batch(plan(Estimator(laboratory(), load, mlperf_law() if law else None), [workers], Goal()), load)
    path.write_text(json.dumps(plan_as_data(result, "laboratory", **typed)), encoding="utf-8")
    return result


def trained(path: Path, recipe: str, *typed: str, epochs: float | None = None, scale: str | None = None) -> Config:
    """The settings that `megabatch train RECIPE --plan PATH` ends with."""
    planned = follow(path, recipe, None, None, {"RANK": "0"}, epochs=epochs, scale=scale)
    return load_config(recipe, [*planned.overrides, *typed], scale=planned.scale, epochs=planned.epochs)


def test_a_run_trains_as_long_as_was_predicted(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert load_config("mikami2018").train.epochs == 90
    result = written(path, "mikami2018", law=True)
    epochs = result.chosen.epochs.middle
    followed = trained(path, "mikami2018")
    assert epochs <= followed.train.epochs < epochs + 0.1
    assert followed.train.epochs == round(followed.train.epochs, 1)
    # Schedules are compressed with it: they end where the run ends.
    assert followed.optimizer == load_config("mikami2018", epochs=followed.train.epochs).optimizer
    written(path, "mikami2018", epochs=5.0)
    assert trained(path, "mikami2018").optimizer == load_config("mikami2018", epochs=5.0).optimizer
    assert trained(path, "mikami2018").train.epochs == 5
    # `--set` wins over `--epochs` in a plan as in a run.
    written(path, "mikami2018", epochs=5.0, overrides=["train.epochs=4"])
    assert trained(path, "mikami2018").train.epochs == 4


def test_overrides_and_scale_of_the_plan_are_the_runs(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    written(path, "mikami2018", overrides=["comm.grad_dtype=fp32", "data.image_size = 128"])
    found = trained(path, "mikami2018")
    assert (found.comm.grad_dtype, found.data.image_size) == ("fp32", 128)
    written(path, "mikami2018", workers=4, scale="cifar10")
    assert trained(path, "mikami2018").data == load_config("mikami2018", scale="cifar10").data
    assert trained(path, "mikami2018", scale="cifar10") == trained(path, "mikami2018")
    with pytest.raises(ConfigError, match="is for --scale cifar10, --scale fashion-mnist was given"):
        trained(path, "mikami2018", scale="fashion-mnist")


def test_what_is_typed_after_train_wins(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    written(
        path, "mikami2018", overrides=["comm.grad_dtype=fp32", "train.global_batch_size=0:32768 30:65536"], law=True
    )
    assert trained(path, "mikami2018", "comm.grad_dtype=bf16", "train.epochs=2").comm.grad_dtype == "bf16"
    assert trained(path, "mikami2018", "train.epochs=2").train.epochs == 2
    planned = trained(path, "mikami2018")
    for epochs in (planned.train.epochs, planned.train.epochs / 2, 7.3):
        found = trained(path, "mikami2018", epochs=epochs)
        assert found.train.epochs == epochs
        stages = BatchStages((0.0, 30.0 * (epochs / 90)), (32768, 65536))
        assert parse_stages(found.train.global_batch_size) == stages


def law_of(epochs: float) -> ConvergenceLaw:
    """A target that takes so many epochs, whatever the batch."""
    none = ((0.0, 0.0), (0.0, 0.0))
    return ConvergenceLaw(epochs, math.inf, none, 0.0, (8192, 16384))


@pytest.mark.parametrize("typed", [None, 41.7])
def test_rate_and_batch_change_at_the_same_step_whatever_the_length(tmp_path: Path, typed: float | None) -> None:
    """smith2017 lets the rate fall and the batch grow at epoch 30 of 90: one boundary, at every length of a target."""
    recipe, images = load_config("smith2017"), 1_281_167
    path = tmp_path / "plan.json"
    for length in (35 + 0.37 * index for index in range(109)):  # to 75 epochs
        load = workload_of("smith2017")
        result = plan(Estimator(laboratory(), load, law_of(length)), [64], Goal(), space=Space(("torus",), None, 25.0))
        path.write_text(json.dumps(plan_as_data(own_batch(result, load), "laboratory")), encoding="utf-8")
        config = trained(path, "smith2017", epochs=typed)
        assert config.train.epochs == (typed or pytest.approx(length, rel=3e-3))
        assert isinstance(config.optimizer.lr, tuple)
        assert isinstance(recipe.optimizer.lr, tuple)
        (_, start), boundary = parse_stages(config.train.global_batch_size).from_epochs, config.optimizer.lr[1]
        assert first_sample(start, images) == first_sample(boundary.until_epoch, images), length
        assert start == boundary.until_epoch


def test_the_ghost_batch_size_is_the_priced_one(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    result = written(path, "mikami2018", workers=4096)
    assert trained(path, "mikami2018").train.ghost_batch_size == result.chosen.step_time.ghost_batch_size < 16


@pytest.mark.parametrize(
    "damage", [{"overrides": "x"}, {"overrides": [1]}, {"epochs": "x"}, {"settings": []}, {"stages": {}}, {"scale": 5}]
)
def test_damaged_values_are_one_line(tmp_path: Path, damage: dict[str, Any]) -> None:
    path = tmp_path / "plan.json"
    written(path, "mikami2018")
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | damage), encoding="utf-8")
    with pytest.raises(ConfigError, match="is damaged"):
        read_plan(path)


@pytest.mark.parametrize("text", ["", "[]", '{"megabatch_plan": 99}', '{"megabatch_plan": 1}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="megabatch plan --output"):
        read_plan(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_plan(tmp_path / "none.json")


def test_following_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for workers in (16, 256):
        result = plan(Estimator(laboratory(), workload()), [workers], Goal())
        path.write_text(json.dumps(plan_as_data(result, "laboratory")), encoding="utf-8")
        grid = result.chosen.candidate.grid.text
        assert follow(path, "test", None, None, {"RANK": "0"}).workers is None
        assert follow(path, "somewhere/test.toml", None, workers, {}).grid == grid
        assert follow(path, "test", "1x2", 2, {}).grid == "1x2"
        assert follow(path, "test", None, 2, {}).grid is None  # the plan's grid does not fit two workers
        if workers == 16:
            assert follow(path, "test", None, None, {}).workers == 16
        else:
            with pytest.raises(ConfigError, match="put srun, torchrun or mpirun"):
                follow(path, "test", None, None, {})
    with pytest.raises(ConfigError, match="is for recipe 'test'"):
        follow(path, "demo", None, None, {})
