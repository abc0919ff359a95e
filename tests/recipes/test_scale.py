"""Scaled recipes keep batch / images, epochs, steps and the shape of every schedule; mistakes are one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megabatch.config import Config
from megabatch.errors import ConfigError
from megabatch.recipes import load_config, recipe_names
from megabatch.recipes.scale import Profile, at_scale, over_epochs, profile_names, read_profile, scaling_lines
from megabatch.schedule.batch import count_steps, parse_stages
from megabatch.schedule.pieces import value_at

REFERENCE = {"paper": "p", "hardware": "1024 GPUs", "time": "t", "accuracy": "a", "images": 1_281_167, "workers": 1088}
RATE = [
    {"until_epoch": 5, "shape": "linear", "start": 0.1, "end": 6.0},
    {"until_epoch": 60, "shape": "polynomial", "start": 6.0, "end": 0.0, "power": 2, "from_epoch": 0, "end_epoch": 90},
    {"until_epoch": 90, "start": 0.01},
]


def large(**sections: Any) -> Config:
    table = {
        "reference": REFERENCE,
        "data": {"source": "folder", "augment": {"crop": "resized", "flip": True}},
        "model": {"name": "resnet50", "zero_gamma": "last_block_of_stage"},
        "train": {"global_batch_size": "0:34816 30:69632", "ghost_batch_size": 16, "epochs": 90, "precision": "fp16"},
        "optimizer": {"name": "lars", "lr": RATE, "lars": {"trust_coefficient": 0.01}},
        "comm": {"algorithm": "torus", "grad_dtype": "fp16"},
        "checkpoint": {"every_epochs": 3},
        **sections,
    }
    return Config.model_validate(table)


def steps_of(config: Config) -> int:
    images = config.reference.images or 0
    stages = parse_stages(config.train.global_batch_size)
    return count_steps(stages, config.train.ghost_batch_size, images, round(config.train.epochs * images))


@pytest.mark.parametrize("name", profile_names())
def test_batch_over_set_epochs_steps_and_schedules_stay(name: str) -> None:
    published, profile = large(), read_profile(name)
    scaled = at_scale(published, profile)
    assert parse_stages(scaled.train.global_batch_size).from_epochs == (0.0, 30.0)
    for before, after in zip(
        (34816, 69632), parse_stages(scaled.train.global_batch_size).global_batch_sizes, strict=True
    ):
        assert after % scaled.train.ghost_batch_size == 0
        assert abs(after - before * profile.images / 1_281_167) <= scaled.train.ghost_batch_size / 2
    assert scaled.train.epochs == 90
    assert scaled.optimizer == published.optimizer
    assert steps_of(scaled) == pytest.approx(steps_of(published), rel=0.01)
    assert (scaled.data.image_size, scaled.data.augment.crop) == (32 if name == "cifar10" else 28, "pad")
    assert (scaled.model.name, scaled.model.zero_gamma) == ("resnet8", "last_block_of_stage")
    assert (scaled.train.precision, scaled.train.ghost_batch_size, scaled.comm) == ("fp32", 32, published.comm)
    reference = scaled.reference
    assert (reference.images, reference.workers, reference.paper) == (profile.images, None, "p")
    assert "not known" in reference.accuracy


def test_every_shipped_recipe_can_be_scaled_and_shortened() -> None:
    for name in recipe_names():
        published = load_config(name)
        if published.reference.images is None:  # `photos` follows the set by itself
            with pytest.raises(ConfigError, match=r"add reference\.images"):
                load_config(name, scale="fashion-mnist")
            continue
        config = load_config(name, scale="fashion-mnist", epochs=published.train.epochs / 4)
        assert config.train.epochs == published.train.epochs / 4
        assert value_at(config.optimizer.lr, 0.0) == value_at(published.optimizer.lr, 0.0)


def test_shortened_every_epoch_of_every_setting_shrinks_alike() -> None:
    published = large(optimizer={"name": "rmsprop_warmup", "lr": RATE, "momentum": 0.9})
    short = over_epochs(published, 30)
    assert short.train.epochs == 30
    for epoch in (0, 1, 4.9, 5.1, 33, 59.9, 60.1, 89):
        before = value_at(published.optimizer.lr, epoch)
        assert value_at(short.optimizer.lr, epoch / 3) == pytest.approx(before, rel=1e-9)
    assert parse_stages(short.train.global_batch_size).from_epochs == (0.0, 10.0)
    warmup = short.optimizer.rmsprop_warmup
    assert (warmup.center_epoch, warmup.period_epochs) == pytest.approx((10 / 3, 5 / 3))
    assert warmup.whole_epochs is False
    assert (short.checkpoint.every_epochs, short.train.evaluate_every_epochs) == (3.0, 1.0)
    assert over_epochs(published, 90) == published
    assert steps_of(short) == pytest.approx(steps_of(published) / 3, rel=0.01)


def test_overrides_come_last_and_the_ghost_batch_size_rounds() -> None:
    config = load_config(
        "demo",
        ["train.ghost_batch_size=48", "optimizer.lr_factor=0.5", "train.seed=3", "data.path=x"],
        scale="cifar10",
    )
    exact = 512 * 50_000 / 60_000
    assert config.train.ghost_batch_size == 48
    assert config.train.global_batch_size == round(exact / 48) * 48
    assert (config.optimizer.lr_factor, config.train.seed, config.data.path) == (0.5, 3, "x")
    assert load_config("demo", ["train.global_batch_size=640"], scale="cifar10").train.global_batch_size == 640


def test_a_batch_never_vanishes_and_a_profile_may_keep_images_out() -> None:
    profile = Profile(name="p", images=1000, data={"held_out_images": 200}, train={"ghost_batch_size": 16})
    assert profile.training_images == 800
    assert Profile(images=1000, data={"max_train_images": 300}).training_images == 300
    small = large(train={"global_batch_size": 256, "ghost_batch_size": 16, "epochs": 90})
    tiny = Profile(name="p", images=1000, data={"source": "generated"}, train={"ghost_batch_size": 16})
    assert at_scale(small, tiny).train.global_batch_size == 16


def test_the_lines_say_what_was_rounded() -> None:
    published = large()
    scaled = at_scale(published, read_profile("cifar10"))
    lines = scaling_lines(published, scaled)
    assert lines[0] == "scaled         1,281,167 -> 50,000 images, network resnet8"
    assert lines[1] == (
        "global batch   34,816 (2.72% of the set) -> 1,344 (2.69%), rounded from 1,358.8 to whole ghost batches of 32 "
        "(-1.1%)"
    )
    assert lines[3].startswith("steps          2,2")
    assert len(lines) == 4


def test_a_profile_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('images = 3000\n[data]\nsource = "generated"\nimage_size = 8\n[train]\nghost_batch_size = 10\n')
    config = load_config("demo", scale=str(path))
    assert (config.data.source, config.train.global_batch_size) == ("generated", 30)
    path.write_text("[data]\n")
    with pytest.raises(ConfigError, match=r"no profile: 'images': field required"):
        load_config("demo", scale=str(path))
    path.write_text("images = [")
    with pytest.raises(ConfigError, match="must be a TOML file"):
        load_config("demo", scale=str(path))


def test_mistakes_are_one_line() -> None:
    calls: list[tuple[Any, str]] = [
        (lambda: load_config("demo", scale="cifar"), "unknown scale 'cifar'; did you mean 'cifar10'?"),
        (lambda: load_config("demo", scale="zzzz"), "known: cifar10, fashion-mnist"),
        (lambda: load_config("demo", epochs=0), "--epochs 0 cannot be used"),
        (lambda: load_config("demo", epochs=float("nan")), "--epochs nan"),
        (lambda: at_scale(large(reference=REFERENCE | {"images": None}), read_profile("cifar10")), "reference.images"),
    ]
    for call, said in calls:
        with pytest.raises(ConfigError) as caught:
            call()
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_stretched_stage_begins_where_the_stretched_schedules_do() -> None:
    stretched = over_epochs(
        large(train={"global_batch_size": "0:34816 60:69632", "ghost_batch_size": 16, "epochs": 90}), 7
    )
    assert isinstance(stretched.optimizer.lr, tuple)
    assert parse_stages(stretched.train.global_batch_size).from_epochs[1] == stretched.optimizer.lr[1].until_epoch
