"""Arms of a study that are tuned with the same effort, and a tuned recipe as an arm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megabatch.errors import ConfigError
from megabatch.recipes import load_config
from megabatch.study.conduct import StudyRequest, conduct
from megabatch.study.plan import Study, from_file
from megabatch.tune.arms import tune_arm
from tests.tune.conftest import TINY

LEVEL = "optimizer.lr_factor"
THREE = ("milder", "as it is", "milder, larger")


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


def tune_all(study: Study, output: Path, request: StudyRequest) -> Study:
    for arm in study.arms:
        study = study.with_arm(tune_arm(study, arm, output, request, lambda line: None))
    return study


@pytest.mark.usefixtures("toy_trainer")
def test_every_arm_gets_the_same_trials_and_then_its_own_rate(tmp_path: Path) -> None:
    file = write_study(tmp_path / "study.toml", f'trials = 6\nsearch = ["{LEVEL}=0.25:8:log"]\nrungs = 2')
    output = tmp_path / "out"
    study = from_file(file)
    request = StudyRequest(str(file), num_jobs=2, output=output, as_json=True)
    tuned = tune_all(study, output, request)
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
    again = tune_all(study, output, request)
    assert again == tuned
    assert (output / "tune" / "nesterov" / "tune.json").read_bytes() == journal
    collecting = StudyRequest(str(file), output=tmp_path / "empty", collect_only=True)
    assert tune_all(study, tmp_path / "empty", collecting) == study
    assert not (tmp_path / "empty").exists()


@pytest.mark.usefixtures("toy_trainer")
def test_an_arm_whose_trials_all_diverge_is_named_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_study(tmp_path / "study.toml", f'trials = 2\nsearch = ["{LEVEL}=30:90:log"]')
    more = """
[[arm]]
name = "milder"
search = ["optimizer.lr_factor=0.5:2:log"]
set = ["optimizer.lr_factor=8"]

[[arm]]
name = "as it is"
tune = false

[[arm]]
name = "milder, larger"
tuned_as = "milder"
set = ["train.global_batch_size=40"]

[[arm]]
name = "after nesterov"
tuned_as = "nesterov"
"""
    file.write_text(file.read_text() + more)
    output = tmp_path / "out"
    request = StudyRequest(str(file), num_jobs=2, output=output)
    assert conduct(request, tune_arm) == 1
    heard = capsys.readouterr().err
    assert "failed: tuning of arm 'nesterov': all 2 trials diverged" in heard
    assert "failed: arm 'after nesterov' waits for the search of 'nesterov'" in heard
    study = from_file(file)
    milder, as_it_is, larger = (tune_arm(study, study.arm(name), output, request, print) for name in THREE)
    found = json.loads((output / "tune" / "milder" / "tune.json").read_text())["best"]["values"][LEVEL]
    assert [arm.config(0).optimizer.lr_factor for arm in (milder, as_it_is, larger)] == [found, 1.0, found]
    assert larger.config(0) == milder.config(0).model_copy(
        update={"train": milder.config(0).train.model_copy(update={"global_batch_size": 40})}
    )
    # What ran is what was found too: the search replaces the level that `milder` begins with.
    settings = (output / "logs").glob("*larger-seed-0.toml")
    assert [load_config(str(path)).optimizer.lr_factor for path in settings] == [found]
    assert not (output / "tune" / "as-it-is").exists()
    rows = json.loads((output / "study.json").read_text())["arms"]
    assert [row["arm"] for row in rows] == list(THREE)


def test_a_tuned_recipe_is_an_arm_and_a_wrong_table_is_refused(tmp_path: Path) -> None:
    config = load_config("demo", [*TINY, f"{LEVEL}=1.5"])
    (tmp_path / "best.toml").write_text(config.to_toml())
    file = tmp_path / "study.toml"
    file.write_text('title = "t"\n[[arm]]\nname = "tuned"\nrecipe = "best.toml"\n')
    assert from_file(file).arms[0].config(0) == config
    with pytest.raises(ConfigError, match=r"tune\.trials"):
        from_file(write_study(file, "trials = 0"))
