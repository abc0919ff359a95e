"""The memory that is counted with fake tensors, beside the planner's estimate."""

from __future__ import annotations

import pytest

from megabatch.bench.memory import count_memory
from megabatch.config import Config
from megabatch.plan.memory import estimate
from megabatch.recipes import load_config


def config_of(*settings: str) -> Config:
    sizes = ("data.source=generated", "data.path=", "train.ghost_batch_size=64", "train.global_batch_size=4096")
    return load_config("mikami2018", [*sizes, *settings])


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("model", ["resnet18", "resnet50"])
def test_the_estimate_is_near_the_count(model: str, precision: str) -> None:
    config = config_of(f"model.name={model}", f"train.precision={precision}", "data.image_size=160")
    guessed, counted = estimate(config, passes=8), count_memory(config, world_size=8)
    assert guessed is not None
    assert guessed.passed == pytest.approx(counted.passed, rel=0.15)
    # The set of the test has 10 classes, the stored network 1000.
    assert guessed.weights == pytest.approx(counted.weights, rel=0.1)


def test_a_count_grows_with_the_ghost_batch_and_its_state_does_not() -> None:
    small, large = (
        count_memory(config_of("model.name=resnet18", f"train.ghost_batch_size={ghost}"), 1) for ghost in (16, 64)
    )
    assert large.passed == pytest.approx(4 * small.passed, rel=0.1)
    assert (small.weights, small.optimizer) == (large.weights, large.optimizer)
