"""Arms of a study that are tuned with the same effort, and a tuned recipe as an arm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megabatch.errors import ConfigError, TrainingError
from megabatch.recipes import load_config
from megabatch.study.conduct import StudyRequest, conduct
from megabatch.study.plan import from_file
from megabatch.tune.arms import tune_arms
from tests.tune.conftest import TINY

LEVEL = "optimizer.lr_factor"


def write_study(path: Path, tune: str) -> Path:
    path.write_text(
        f"""
title = "tuned"
recipe = "demo"
seeds = 1
set = {json.dumps(list(TINY))}

[tune]
{tune}

[[arm]]
name = "nesterov"

[[arm]]
name = "Plain one"
set = ["optimizer.nesterov=false"]
"""
    )
    return path


@pytest.mark.usefixtures("toy_trainer")
def test_every_arm_gets_the_same_trials_and_then_its_own_rate(tmp_path: Path) -> None:
    file = write_study(tmp_path / "study.toml", f'trials = 6\nsearch = ["{LEVEL}=0.25:8:log"]\nrungs = 2')
    output = tmp_path / "out"
    study = from_file(file)
    request = StudyRequest(str(file), num_jobs=2, output=output, as_json=True)
    tuned = tune_arms(study, output, request, lambda line: None)
    for arm, before, folder in zip(tuned.arms, study.arms, ("nesterov", "plain-one"), strict=True):
        whole = json.loads((output / "tune" / folder / "tune.json").read_text())
        assert len(whole["trials"]) == 6
        assert arm.config(3).optimizer.lr_factor == whole["best"]["values"][LEVEL] != 1.0
        # All the rest is the arm's own: seed, images, length, method.
        same = before.config(3).model_copy(update={"optimizer": arm.config(3).optimizer})
        assert arm.config(3) == same
        assert arm.config(3).optimizer.nesterov == before.config(3).optimizer.nesterov
    assert tuned.arms[0].config(0).data.held_out_images == 0
    journal = (output / "tune" / "nesterov" / "tune.json").read_bytes()
    again = tune_arms(study, output, request, lambda line: None)
    assert again == tuned
    assert (output / "tune" / "nesterov" / "tune.json").read_bytes() == journal
    collecting = StudyRequest(str(file), output=tmp_path / "empty", collect_only=True)
    assert tune_arms(study, tmp_path / "empty", collecting, print) == study
    assert not (tmp_path / "empty").exists()


@pytest.mark.usefixtures("toy_trainer")
def test_an_arm_whose_trials_all_diverge_is_named(tmp_path: Path) -> None:
    file = write_study(tmp_path / "study.toml", f'trials = 2\nsearch = ["{LEVEL}=30:90:log"]')
    with pytest.raises(TrainingError, match="tuning of arm 'nesterov': all 2 trials diverged"):
        conduct(StudyRequest(str(file), num_jobs=2, output=tmp_path / "out"), tune_arms)


def test_a_tuned_recipe_is_an_arm_and_a_wrong_table_is_refused(tmp_path: Path) -> None:
    config = load_config("demo", [*TINY, f"{LEVEL}=1.5"])
    (tmp_path / "best.toml").write_text(config.to_toml())
    file = tmp_path / "study.toml"
    file.write_text('title = "t"\n[[arm]]\nname = "tuned"\nrecipe = "best.toml"\n')
    assert from_file(file).arms[0].config(0) == config
    with pytest.raises(ConfigError, match=r"tune\.trials"):
        from_file(write_study(file, "trials = 0"))
