"""Held-out images, lengths of runs, budgets."""

from __future__ import annotations

import pytest

from megabatch.config import Config
from megabatch.errors import ConfigError
from megabatch.recipes import load_config
from megabatch.schedule.pieces import value_at
from megabatch.train.feed import open_images
from megabatch.tune.plan import make_plan, make_rungs, split


def test_lengths_grow_threefold_and_the_shortest_tells_something() -> None:
    assert [(one.epochs, one.resource) for one in make_rungs(9, 1000)] == [(1, 1), (3, 3), (9, 9)]
    assert [one.epochs for one in make_rungs(9, 360)] == [1, 3, 9]
    assert [one.epochs for one in make_rungs(9, 359)] == [3, 9]
    assert [one.epochs for one in make_rungs(9, 10)] == [9]
    assert [one.epochs for one in make_rungs(9, 10, 2)] == [3, 9]


@pytest.mark.parametrize(
    ("changes", "held_out", "expected"),
    [
        ((), None, (180, 20)),
        ((), 50, (150, 50)),
        (("data.held_out_images=30",), None, (170, 30)),
        (("data.max_train_images=100",), None, (100, 10)),
        (("data.max_train_images=100",), 120, (80, 120)),
    ],
)
def test_images_are_held_out_of_the_training_set(
    tiny: Config, changes: tuple[str, ...], held_out: int | None, expected: tuple[int, int]
) -> None:
    config = load_config("demo", [*_changes(tiny), *changes])
    assert split(200, config, held_out) == expected


def _changes(config: Config) -> list[str]:
    return [f"train.ghost_batch_size={config.train.ghost_batch_size}", "train.global_batch_size=20"]


def test_every_trial_sees_the_same_images_and_never_the_validation_set(tiny: Config) -> None:
    plan = make_plan(tiny, rungs=2)
    one = open_images(plan.config({"optimizer.lr_factor": 0.5}, plan.rungs[0]))
    two = open_images(plan.config({"optimizer.lr_factor": 2.0}, plan.rungs[1]))
    whole, validation = open_images(tiny)
    for first, second in zip(one, two, strict=True):
        assert [first.read(i).tobytes() for i in range(len(first))] == [
            second.read(i).tobytes() for i in range(len(second))
        ]
    train, held_out = ({source.read(i).tobytes() for i in range(len(source))} for source in one)
    everything = {whole.read(i).tobytes() for i in range(len(whole))}
    assert (len(train), len(held_out)) == (180, 20)
    assert train | held_out == everything
    assert not train & held_out
    assert not held_out & {validation.read(i).tobytes() for i in range(len(validation))}


def test_every_schedule_is_stretched(tiny: Config) -> None:
    """The demo rises until 1.5 of 8 epochs; at a ninth of 8 everything happens a ninth as late."""
    plan = make_plan(tiny, rungs=3)
    short = plan.config({}, plan.rungs[0])
    assert short.train.epochs == pytest.approx(8 / 9)
    for epoch in (0.0, 1.5, 5.0):
        assert value_at(short.optimizer.lr, epoch / 9) == pytest.approx(value_at(tiny.optimizer.lr, epoch))
    assert make_plan(tiny, epochs=4, rungs=1).config({}, make_rungs(4, 1, 1)[0]).train.epochs == 4


def test_what_changes_the_digest(tiny: Config) -> None:
    digest = make_plan(tiny).digest
    assert make_plan(tiny).digest == digest
    other = load_config("demo", [*_changes(tiny), "data.source=generated", "optimizer.nesterov=false"])
    plans = [make_plan(tiny, epochs=4), make_plan(tiny, metric="val_loss"), make_plan(other)]
    plans += [make_plan(tiny, search=["optimizer.lr_factor=1:2"]), make_plan(tiny, held_out=21)]
    assert len({digest, *(plan.digest for plan in plans)}) == 6


def test_what_is_refused(tiny: Config) -> None:
    with pytest.raises(ConfigError, match=r"no 195 images can be held out of 200 .* ghost batch needs 10"):
        make_plan(tiny, held_out=195)
    with pytest.raises(ConfigError, match=r"--metric 'top7' is no number.*top1, top5, val_loss"):
        make_plan(tiny, metric="top7")
    with pytest.raises(ConfigError, match=r"names 'optimizer.lr_factor' twice"):
        make_plan(tiny, search=["optimizer.lr_factor=1:2", "optimizer.lr_factor=1:3"])
    with pytest.raises(ConfigError, match="--epochs -1"):
        make_plan(tiny, epochs=-1)
