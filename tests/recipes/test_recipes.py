"""Recipes: shipped ones are sound, files build on each other, overrides reach any depth, mistakes are one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megabatch.config import Config, differences
from megabatch.errors import ConfigError
from megabatch.recipes import config_from_toml, load_config, recipe_names, recipe_path
from megabatch.schedule.pieces import Piece

REFERENCE = '[reference]\npaper = "p"\nhardware = "h"\ntime = "t"\naccuracy = "a"\n'

RECIPE = (
    REFERENCE
    + """
[data]
source = "fashion-mnist"
mean = [0.286]
std = [0.353]
augment = { crop = "pad", padding = 2, flip = true }

[train]
global_batch_size = 1024
ghost_batch_size = 64
epochs = 5

[optimizer]
lr = [
  { until_epoch = 1.0, shape = "linear", start = 0.05, end = 0.8 },
  { until_epoch = 5.0, shape = "linear", start = 0.8, end = 0.0 },
]
"""
)


@pytest.fixture
def mine(tmp_path: Path) -> str:
    return write(tmp_path, "mine", RECIPE)


def complaint(recipe: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, list(overrides))
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_loads_and_reads_back_equal(name: str) -> None:
    config = load_config(name)
    assert config_from_toml(config.to_toml(), "the saved settings") == config
    reference = config.reference
    assert all((reference.paper, reference.hardware, reference.time, reference.accuracy))
    assert recipe_path(name).read_text(encoding="utf-8").isascii()


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("train.epochs=2", lambda c: c.train.epochs, 2.0),
        ("train.epochs = 2.5", lambda c: c.train.epochs, 2.5),
        ("data.source=generated", lambda c: c.data.source, "generated"),
        ('data.source="generated"', lambda c: c.data.source, "generated"),
        ("data.path=/a=b/c d", lambda c: c.data.path, "/a=b/c d"),
        ("data.augment.flip=false", lambda c: c.data.augment.flip, False),
        ("data.mean=[0.25]", lambda c: c.data.mean, (0.25,)),
        ("optimizer.lr=0.25", lambda c: c.optimizer.lr, 0.25),
        ("optimizer.lr.0.end=0.5", lambda c: c.optimizer.lr[0].end, 0.5),
        ('train.global_batch_size="0:1024 2:2048"', lambda c: c.train.global_batch_size, "0:1024 2:2048"),
        ("train.global_batch_size=0:1024 2:2048", lambda c: c.train.global_batch_size, "0:1024 2:2048"),
        ("model.width=8", lambda c: c.model.width, 8),
        ("reference.paper=mine", lambda c: c.reference.paper, "mine"),
    ],
)
def test_an_override_reaches_its_setting(mine: str, override: str, read: Any, value: Any) -> None:
    before, changed = load_config(mine), load_config(mine, [override])
    assert read(changed) == value
    assert list(differences(before, changed)) == [re.sub(r"\.\d.*", "", override.partition("=")[0].strip())]
    assert load_config(mine, []) == before


def test_a_whole_piece_can_be_overridden_and_the_last_override_wins(mine: str) -> None:
    piece = "optimizer.lr.1={ until_epoch = 7, start = 0.3 }"
    config = load_config(mine, ["train.epochs=1", piece, "train.epochs=7"])
    assert config.train.epochs == 7
    assert isinstance(config.optimizer.lr, tuple)
    assert config.optimizer.lr[1] == Piece(until_epoch=7, start=0.3)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.epochs", ["train.epochs", "section.key=value"]),
        ("=3", ["section.key=value"]),
        ("train..epochs=3", ["section.key=value"]),
        ("train.epoch=3", ["unknown key 'train.epoch'", "did you mean 'epochs'?", "mine.toml"]),
        ("trian.epochs=3", ["unknown key 'trian'", "did you mean 'train'?"]),
        ("train.zzzzzz=3", ["unknown key 'train.zzzzzz'", "known:", "global_batch_size"]),
        ("train.ghost-batch=3", ["unknown key 'train.ghost-batch'", "did you mean 'ghost_batch_size'?"]),
        ("bad-key=3", ["unknown key 'bad-key'", "known:", "optimizer"]),
        ("int=3", ["unknown key 'int'"]),
        ("train.float=3", ["unknown key 'train.float'"]),
        ("data.augment.flop=true", ["unknown key 'data.augment.flop'", "did you mean 'flip'?"]),
        ("optimizer.lr.0.stop=3", ["unknown key 'optimizer.lr.0.stop'", "until_epoch"]),
        ("optimizer.lr.7.end=3", ["optimizer.lr", "0 to 1", "'7'"]),
        ("optimizer.lr.x.end=3", ["optimizer.lr", "0 to 1", "'x'"]),
        ("train.epochs.x=3", ["'train.epochs' is a plain value"]),
        ("train.epochs=many", ["'train.epochs' = 'many'", "number"]),
        ("train.epochs=", ["'train.epochs' = ''"]),
        ("train.epochs=-1", ["'train.epochs' = -1", "greater than 0"]),
        ("train.precision=fp8", ["'train.precision' = 'fp8'", "bf16"]),
        ("train=5", ["'train' = 5"]),
        ("train.global_batch_size=1000", ["1000 is not a multiple", "960, 1024"]),
        ("train.global_batch_size=-64", ["train.global_batch_size", "-64"]),
        ("train.global_batch_size=0:many", ["'0:many'", "EPOCH:BATCH"]),
        ("optimizer.lr=fast", ["optimizer.lr", "'fast'"]),
        ("optimizer.lr.0.start=-1", ["'optimizer.lr.0.start' = -1"]),
        ("optimizer.lr.0.shape=zigzag", ["optimizer.lr.0.shape", "'zigzag'", "cosine"]),
        ("optimizer.lr.1={ until_epoch = 7 }", ["lacks 'optimizer.lr.1.start'"]),
        ("optimizer.lr.1={ until_epoch = 0.5, start = 1 }", ["rising until_epoch", "[1.0, 0.5]"]),
        ("optimizer.lr.1={ until_epoch = 7, start = 1, shape = 'linear' }", ["needs an `end`"]),
        ("data.mean=[0.1, 0.2]", ["data.mean has 2 values", "data.std 1"]),
    ],
)
def test_a_bad_override_is_one_line_that_names_it(mine: str, override: str, words: list[str]) -> None:
    message = complaint(mine, override)
    for word in words:
        assert word in message


def test_an_unknown_recipe_names_the_nearest_or_all() -> None:
    assert "did you mean 'demo'?" in complaint("dem")
    assert "known:" in complaint("zzzzzzzz")
    assert "demo" in complaint("zzzzzzzz")
    assert "does not exist" in complaint("nowhere/at/all.toml")


def write(folder: Path, name: str, text: str) -> str:
    path = folder / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_recipe_builds_on_another(tmp_path: Path) -> None:
    write(tmp_path, "bottom", REFERENCE + "[train]\nepochs = 3\nseed = 5\n[data]\nmean = [0.1]\nstd = [0.2]\n")
    write(tmp_path, "middle", 'base = "bottom"\n[train]\nepochs = 4\n[reference]\ntime = "later"\n')
    top = write(tmp_path, "top", 'base = "middle"\n[train]\nseed = 6\n[data]\nmean = [0.3]\n')
    config = load_config(top, ["train.ghost_batch_size=8"])
    assert (config.train.epochs, config.train.seed, config.train.ghost_batch_size) == (4, 6, 8)
    assert (config.reference.paper, config.reference.time) == ("p", "later")
    assert (config.data.mean, config.data.std) == ((0.3,), (0.2,))


def test_a_file_can_build_on_a_shipped_recipe_and_a_sibling_comes_first(tmp_path: Path) -> None:
    mine = write(tmp_path, "mine", 'base = "demo"\n[train]\nepochs = 1.25\n')
    shipped = load_config("demo")
    expected = shipped.model_copy(update={"train": shipped.train.model_copy(update={"epochs": 1.25})})
    assert load_config(mine) == expected
    write(tmp_path, "demo", REFERENCE + "[train]\nseed = 9\n")
    assert load_config(mine).train.seed == 9


def test_circles_and_bad_files_are_one_line(tmp_path: Path) -> None:
    one = write(tmp_path, "one", 'base = "two"\n')
    write(tmp_path, "two", 'base = "one"\n')
    assert "builds on itself" in complaint(one)
    assert "not-there" in complaint(write(tmp_path, "orphan", 'base = "not-there"\n'))
    assert "TOML" in complaint(write(tmp_path, "torn", "[train\n"))
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "TOML" in complaint(str(binary))


def test_a_circle_through_another_spelling_of_the_path_is_seen_too(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    one = write(folder, "one", 'base = "../d/two"\n')
    write(folder, "two", 'base = "../d/one"\n')
    assert "builds on itself" in complaint(one)


def test_config_from_toml_says_where_the_text_came_from() -> None:
    for text in ("[train\n", REFERENCE + "[train]\nepoch = 3\n", "[train]\nepochs = 0\n"):
        with pytest.raises(ConfigError, match=r"'runs/a/config\.toml'") as caught:
            config_from_toml(text, source="'runs/a/config.toml'")
        assert "\n" not in str(caught.value)
    assert isinstance(config_from_toml(REFERENCE, source="here"), Config)
