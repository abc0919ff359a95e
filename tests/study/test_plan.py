"""Study files and grids: which arms and runs follow from them, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megabatch.errors import ConfigError
from megabatch.schedule.batch import count_steps, parse_stages
from megabatch.study.plan import from_file, from_grid, is_study_file, run_key


def test_arms_of_a_file(study_file: Path) -> None:
    study = from_file(study_file, ["train.epochs=2"])
    small, large, ensemble = study.arms
    assert (study.baseline, study.margin_points) == ("Small", 1.5)
    assert large.set == (
        "train.ghost_batch_size=32",
        "train.global_batch_size=64",
        "train.label_smoothing=0",
        "train.global_batch_size=128",
        "train.epochs=2",
    )
    assert (small.seeds, large.seeds, ensemble.seeds) == (3, 2, 2)
    assert (large.against, ensemble.against) == ("Small", "large 2x")
    assert (ensemble.metric, ensemble.runs_of) == ("ensemble_top1", "large 2x")


def test_runs_of_a_file(study_file: Path) -> None:
    study = from_file(study_file)
    runs = study.runs()
    assert [(run.arm, run.seed) for run in runs] == [
        *(("Small", seed) for seed in range(3)),
        *(("large 2x", seed) for seed in range(2)),
    ]
    assert [run.config.train.seed for run in runs] == [0, 1, 2, 0, 1]
    assert [run.config.train.global_batch_size for run in runs] == [64, 64, 64, 128, 128]
    assert runs[3].key == "large-2x/seed-0" == run_key("large 2x", 0)
    assert study.runs_of(study.arms[2]) == ["large-2x/seed-0", "large-2x/seed-1"]


def test_a_recipe_beside_the_study_is_found(tmp_path: Path, study_file: Path) -> None:
    (tmp_path / "mine.toml").write_text('base = "demo"\n[train]\nepochs = 3\n')
    study_file.write_text(study_file.read_text().replace('recipe = "demo"', 'recipe = "mine.toml"'))
    assert {run.config.train.epochs for run in from_file(study_file).runs()} == {3.0}


def test_a_grid_is_every_combination() -> None:
    study = from_grid("demo", ["train.global_batch_size=64,128", 'train.global_batch_size="0:64,1:128"'], 1)
    assert [arm.set for arm in study.arms] == [
        ("train.global_batch_size=64", 'train.global_batch_size="0:64,1:128"'),
        ("train.global_batch_size=128", 'train.global_batch_size="0:64,1:128"'),
    ]
    three = from_grid("demo", ["model.width=4,8,16", "norm.momentum=0.1,1.0"], 2, ["train.epochs=1"])
    assert len(three.arms) == 6
    assert len(three.runs()) == 12
    assert {arm.against for arm in three.arms} == {"model.width=4  norm.momentum=0.1"}
    assert all(run.config.train.epochs == 1 for run in three.runs())
    lists = from_grid("demo", ["data.mean=[0.1],[0.2]"], 1)
    assert [run.config.data.mean for run in lists.runs()] == [(0.1,), (0.2,)]


def test_no_vary_is_one_arm_of_many_seeds() -> None:
    assert [arm.name for arm in from_grid("demo", [], 5).arms] == ["demo"]
    assert len(from_grid("demo", [], 5).runs()) == 5


def test_what_is_a_study_file(study_file: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('base = "demo"\n')
    assert is_study_file(str(study_file))
    assert not is_study_file(str(recipe))
    assert not is_study_file("demo")
    assert not is_study_file("nowhere.toml")


@pytest.mark.parametrize("vary", ["train.epochs", "=1,2", "train.epochs=", "train.epochs=1,,2"])
def test_a_vary_that_cannot_be_read(vary: str) -> None:
    with pytest.raises(ConfigError, match="write key=a,b,c"):
        from_grid("demo", [vary], 1)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('name = "large 2x"', 'name = "Small"', "two arms 'Small'"),
        ('like = "Small"', 'like = "Smal"', "builds on 'Smal', which is no arm before it; did you mean 'Small'"),
        ('against = "large 2x"', 'against = "nobody"', "compared with 'nobody', which is no arm"),
        ('recipe = "demo"', "", "names no recipe"),
        ('title = "tiny"', "", "title"),
        ("seeds = 3", "sedes = 3", "sedes"),
        ("seeds = 3", "seeds = 0", "seeds"),
        ('name = "large 2x, ensemble"', 'name = "small"', "give one folder"),
        ("[[arm]]", "[[arm", "cannot be read"),
        ("margin_points = 1.5", "margin_points = 0", "margin_points"),
    ],
)
def test_files_that_are_refused(study_file: Path, old: str, new: str, complaint: str) -> None:
    text = study_file.read_text()
    assert old in text
    study_file.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=complaint):
        from_file(study_file)


STUDIES = Path(__file__).parents[2] / "studies"


@pytest.mark.parametrize("name", [path.stem for path in sorted(STUDIES.glob("*.toml")) if is_study_file(str(path))])
def test_shipped_studies_can_be_run(name: str) -> None:
    """Every arm builds, and the largest batch of a long study gets the 600 steps without which it shows nothing."""
    study = from_file(STUDIES / f"{name}.toml")
    for run in study.runs():
        stages = parse_stages(run.config.train.global_batch_size)
        images = run.config.data.max_train_images or run.config.reference.images or 0
        steps = count_steps(stages, run.config.train.ghost_batch_size, images, round(run.config.train.epochs * images))
        assert run.config.train.threads_per_worker == 1
        # "exact" compares no batches; PLAN.md says why 32 % in "tuned" has 300 only (Codreanu: and a collapse).
        at_least = {"short": 300, "exact": 200, "tuned": 286}.get(name, 600)
        assert steps >= at_least or run.config.train.max_steps


def test_a_setting_that_does_not_exist_is_told_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'train\.epoch'"):
        from_grid("demo", ["train.epoch=1,2"], 1).runs()


def test_scale_and_epochs_reach_the_settings(study_file: Path, tmp_path: Path) -> None:
    """As `train --scale FILE --epochs E` does; the file lies beside the study, an arm may have its own."""
    (tmp_path / "tiny.toml").write_text(
        'images = 1000\n[data]\nsource = "generated"\nimage_size = 8\n[train]\nghost_batch_size = 32\n'
    )
    (tmp_path / "mine.toml").write_text('base = "demo"\n[reference]\nimages = 2000\n[train]\nglobal_batch_size = 640\n')
    text = study_file.read_text().replace('recipe = "demo"', 'recipe = "mine.toml"\nscale = "tiny.toml"\nepochs = 4')
    text = text.replace(
        'set = ["train.ghost_batch_size=32", "train.global_batch_size=64", "train.label_smoothing=0"]', ""
    )
    study_file.write_text(text.replace('name = "large 2x"\n', 'name = "large 2x"\nepochs = 16\n'))
    small, *_, large = from_file(study_file).runs()
    assert small.config.train.global_batch_size == 320  # half the images, half the batch
    assert small.config.data.image_size == 8
    assert [piece.until_epoch for piece in small.config.optimizer.lr] == [0.75, 4.0]  # type: ignore[union-attr]
    assert large.config.train.epochs == 16
