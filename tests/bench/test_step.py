"""Step times by local batch: what is measured, and of which layers."""

from __future__ import annotations

from typing import Any

import pytest

from megabatch.bench.step import StepBenchRequest, bench_steps, parse_batches
from megabatch.errors import ConfigError
from megabatch.plan.compute import step_times_from_data
from megabatch.recipes import load_config


def test_batches() -> None:
    assert parse_batches("", 64) == (32, 64, 128)
    assert parse_batches("", 2) == (2, 4)
    assert parse_batches("64,16,16", 32) == (16, 64)
    for text in ("many", "1,2", "16;32"):
        with pytest.raises(ConfigError):
            parse_batches(text, 32)


def test_a_measurement_is_what_the_planner_reads() -> None:
    config = load_config("demo", ["train.threads_per_worker=1"])
    told: list[dict[str, Any]] = []
    assert bench_steps(StepBenchRequest(config, (2, 8), iterations=3), lambda _, one: told.append(one), {}) == 0
    [result] = told
    assert all(row["seconds"] > 0 for row in result["rows"])
    for row in result["rows"]:  # on a busy machine the smaller batch may take longer, which the planner refuses
        row["seconds"] = 1e-3 * row["local_batch"]
    times = step_times_from_data(result, "test")
    assert [row.local_batch for row in times.rows] == [2, 8]
    assert all(row.iterations == 3 for row in times.rows)
    assert 0 < times.backward_share < 1
    assert sum(layer.work for layer in times.layers) == pytest.approx(1)

    from megabatch.model.registry import build_model

    network = build_model("resnet8", num_classes=10, in_channels=1)
    assert sum(layer.parameters for layer in times.layers) == sum(p.numel() for p in network.parameters())
    assert times.layers[0].name == "conv1"
