"""What is searched by default, what --search reads, and how values enter a recipe."""

from __future__ import annotations

import pytest

from megabatch.config import Config
from megabatch.errors import ConfigError
from megabatch.recipes import load_config, recipe_names
from megabatch.schedule.pieces import Piece, value_at
from megabatch.tune.space import (
    LEVEL,
    WARMUP,
    Dimension,
    default_space,
    own_values,
    parse_search,
    warmup_of,
    with_values,
    with_warmup,
)


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_has_a_space_that_holds_its_own_values_and_whose_ends_work(name: str) -> None:
    config = load_config(name)
    space = default_space(config)
    own = own_values(config, space)
    assert {one.key for one in space} >= {"train.label_smoothing"}
    for one in space:
        assert one.low < one.high
        assert one.low <= own[one.key] <= one.high
        for end in (one.low, one.high):
            with_values(config, {one.key: end})
    assert with_values(config, own).optimizer.lr_factor == config.optimizer.lr_factor


def level(batch: int, *changes: str) -> Dimension:
    config = load_config(
        "demo", ["train.ghost_batch_size=32", f"train.global_batch_size={batch}", "optimizer.lr=0.1", *changes]
    )
    return next(one for one in default_space(config) if one.key == LEVEL)


def test_the_level_of_sgd_goes_by_the_batch() -> None:
    """Recipe at 0.1: square root and linear scaling of 0.1 per 256 images, by hand."""
    assert (level(256).low, level(256).high) == pytest.approx((0.25, 4.0))
    assert (level(4096).low, level(4096).high) == pytest.approx((1 / 4, 16 * 4))
    assert (level(1024, "optimizer.lr=0.4").low, level(1024, "optimizer.lr=0.4").high) == pytest.approx((0.5 / 4, 4.0))
    # A momentum of 0.95 makes a step worth twice as much: half the lr.
    assert level(256, "optimizer.momentum=0.95").low == pytest.approx(0.125)


def test_lars_has_its_coefficient_and_a_schedule_is_not_left_open() -> None:
    keys = [one.key for one in default_space(load_config("demo", ["optimizer.name=lars"]))]
    assert keys[-1] == "optimizer.lars.trust_coefficient"
    pieces = "[{until_epoch = 4.0, start = 0.9}, {until_epoch = 8.0, start = 0.95}]"
    keys = [one.key for one in default_space(load_config("demo", [f"optimizer.momentum={pieces}"]))]
    assert "optimizer.momentum" not in keys


def test_the_demo_with_another_warm_up() -> None:
    config = load_config("demo")
    assert warmup_of(config) == 1.5
    longer = with_values(config, {WARMUP: 3.0}).optimizer.lr
    assert [value_at(longer, epoch) for epoch in (0, 1.5, 3, 5.5, 8)] == pytest.approx([0.05, 0.425, 0.8, 0.4, 0.0])
    none = with_values(config, {WARMUP: 0.0}).optimizer.lr
    assert [value_at(none, epoch) for epoch in (0, 4, 8)] == pytest.approx([0.8, 0.4, 0.0])


def test_a_warm_up_over_a_schedule_that_had_none() -> None:
    plain = [Piece(until_epoch=10, shape="cosine", start=1.0, end=0.0), Piece(until_epoch=20, start=0.0)]
    warm = with_warmup(plain, 2.0, 20.0)
    assert value_at(warm, 0) == 0
    assert value_at(warm, 1) == pytest.approx(value_at(plain, 2) / 2)
    for epoch in (2.0, 5.0, 9.0, 15.0):
        assert value_at(warm, epoch) == pytest.approx(value_at(plain, epoch))
    assert with_warmup(plain, 0.0, 20.0) == tuple(plain)
    assert value_at(with_warmup(0.5, 2.0, 10.0), 1.0) == pytest.approx(0.25)
    assert value_at(with_warmup(0.5, 2.0, 10.0), 7.0) == 0.5


def test_search_is_read(tiny: Config) -> None:
    assert parse_search("optimizer.lr_factor = 0.1:10:log", tiny) == Dimension(LEVEL, 0.1, 10, log=True)
    assert [parse_search(one.key, tiny) for one in default_space(tiny)] == list(default_space(tiny))
    assert parse_search("warmup_epochs=0:2", tiny) == Dimension(WARMUP, 0, 2)
    assert parse_search("train.max_skipped_steps=1:9", tiny) == Dimension("train.max_skipped_steps", 1, 9, whole=True)
    assert parse_search(Dimension(LEVEL, 0.5, 2, log=True).text, tiny) == Dimension(LEVEL, 0.5, 2, log=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train.max_skipped_steps", "default range: optimizer.lr_factor, warmup_epochs"),
        ("optimizer.lr_factor=1", "cannot be read"),
        ("optimizer.lr_factor=1:2:lg", "cannot be read"),
        ("optimizer.lr_factor=1:nan", "cannot be read"),
        ("optimizer.lr_factor=2:1", "no rising range"),
        ("optimizer.lr_factor=0:1:log", "no rising range above 0"),
        ("optimizer.lr_fctor=1:2", "has no plain number there"),
        ("optimizer.lr=1:2", "it has a schedule"),
        ("optimizer.name=1:2", "'sgd'"),
        ("train.seed=1:2", "not be comparable"),
        ("data.image_size=8:16", "not be comparable"),
        ("optimizer.momentum=0.5:1.5", "momentum"),
        ("warmup_epochs=0:9", "rising until_epoch"),
    ],
)
def test_a_search_that_cannot_be(tiny: Config, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_search(text, tiny)


def test_a_searched_rate_is_the_one_that_the_warm_up_leads_to() -> None:
    config = load_config("demo", ["optimizer.lr=0.1"])
    for values in ({"optimizer.lr": 0.4, WARMUP: 2.0}, {WARMUP: 2.0, "optimizer.lr": 0.4}):
        lr = with_values(config, values).optimizer.lr
        assert isinstance(lr, tuple)
        assert value_at(lr, 2.0) == pytest.approx(0.4)
