"""The search: nothing better is left out, the front is a front, goals are met or refused."""

from __future__ import annotations

import dataclasses
import math
import time

import pytest

from megabatch.comm.calibration import AxisCost, Calibration
from megabatch.errors import ConfigError
from megabatch.machine import usable_cores
from megabatch.plan.cluster import load_cluster
from megabatch.plan.convergence import mlperf_law
from megabatch.plan.planner import Goal, plan, worker_counts
from megabatch.plan.predict import expected_seconds
from megabatch.plan.quantity import Quantity
from megabatch.plan.search import BUCKETS_MB, Space, grids_of
from megabatch.plan.step import Candidate
from megabatch.schedule.batch import parse_stages
from tests.plan.laboratory import laboratory, workload

PRICED = dataclasses.replace(
    laboratory(software="[software]\nlatency_microseconds = 10"), price_per_node_hour=Quantity(10.0), currency="EUR"
)


def test_the_best_of_everything_is_found() -> None:
    result = plan(PRICED, workload(), [256], Goal())
    every = [
        expected_seconds(PRICED, workload(), Candidate(256, name, grid, bucket))
        for name in ("backend", "torus", "hierarchical")
        for grid in grids_of(256)
        for bucket in BUCKETS_MB
    ]
    # Of those that are as good as equal, the bucket nearest to the usual.
    assert min(every) <= result.chosen.total.middle <= 1.002 * min(every)
    assert result.num_considered >= 9 * (1 + 2 * 7)


def test_the_front_and_the_goals() -> None:
    counts = [64, 128, 256, 512, 1024]
    fastest = plan(PRICED, workload(), counts, Goal())
    assert fastest.chosen.candidate.workers == 1024
    for one in fastest.front:
        assert not any(
            other.total.middle < one.total.middle and other.node_hours.middle < one.node_hours.middle
            for other in fastest.candidates
        )
    cheapest = plan(PRICED, workload(), counts, Goal("cost"))
    assert cheapest.chosen.cost is not None
    assert fastest.chosen.cost is not None
    assert cheapest.chosen.cost.middle < fastest.chosen.cost.middle
    between = plan(PRICED, workload(), counts, Goal(deadline_seconds=2.5 * fastest.chosen.training.middle))
    assert 64 < between.chosen.candidate.workers < 1024
    spend = 0.5 * (cheapest.chosen.cost.middle + fastest.chosen.cost.middle)
    budget = plan(PRICED, workload(), counts, Goal(budget=spend))
    assert budget.chosen.cost is not None
    assert budget.chosen.cost.middle <= spend
    with pytest.raises(ConfigError, match="relax the deadline or the budget"):
        plan(PRICED, workload(), counts, Goal(deadline_seconds=1.0))


def test_batches_compete_by_time_to_the_target() -> None:
    batches = [parse_stages(text) for text in (16384, 65536, "0:16384 30:65536")]
    result = plan(PRICED, workload(), [512], Goal(), batches=batches, law=mlperf_law())
    assert {one.batch for one in result.candidates} == {str(stages) for stages in batches}
    assert any(one.what == "twice the total batch" for one in result.helps)


def test_batches_are_searched_where_convergence_is_known() -> None:
    """Without a law the recipe's batch stands; with one, no batch tried by hand is better than what was found."""
    load, law = workload(65536), mlperf_law()
    alone = plan(PRICED, load, [512], Goal())
    assert {one.batch for one in alone.candidates} == {"65,536"}
    found = plan(PRICED, load, [512], Goal(), law=law)
    assert found.chosen.batch != "65,536"
    assert str(found.load.stages_over(found.chosen.epochs.middle)) == found.chosen.batch
    by_hand = [parse_stages(text) for text in (4096, 16384, 32768, 65536, "0:16384 16:32768")]
    listed = plan(PRICED, load, [512], Goal(), batches=by_hand, law=law)
    assert found.chosen.total.middle <= 1.01 * listed.chosen.total.middle
    assert "65,536" in {one.batch for one in found.candidates}  # the recipe's own is still shown
    assert max(found.load.stages.global_batch_sizes) <= law.batches[1]


def test_what_cannot_be_is_left_out_with_its_reason() -> None:
    result = plan(load_cluster("abci"), workload(), [64, 8192], Goal())
    assert {one.candidate.workers for one in result.candidates} == {64}
    (reason,) = result.left_out
    assert reason.startswith("8,192 workers: ")
    assert "holds 4,352" in reason


def test_a_deadline_that_only_the_middle_meets_says_so() -> None:
    fastest = plan(PRICED, workload(), [1024], Goal()).chosen.training
    near = plan(PRICED, workload(), [1024], Goal(deadline_seconds=1.001 * fastest.middle))
    assert "not by the whole interval" in near.reason
    far = plan(PRICED, workload(), [1024], Goal(deadline_seconds=1.001 * fastest.high))
    assert "interval" not in far.reason


def test_worker_counts() -> None:
    abci = load_cluster("abci")
    assert worker_counts(abci, "1024") == [1024]
    assert worker_counts(abci, "256,1_024") == [256, 1024]
    assert worker_counts(abci, "64..300") == [64, 128, 256, 300]
    assert worker_counts(abci, None)[:2] == [4, 8]
    assert worker_counts(abci, None)[-1] == 4096
    here = load_cluster("this-machine")
    assert worker_counts(here, None)[0] == 1
    assert worker_counts(here, None)[-1] == usable_cores()
    links = Calibration("2x3", 6, "gloo", (AxisCost("column", 2, 1e-4, 1e8), AxisCost("row", 3, 1e-4, 1e8)))
    assert worker_counts(dataclasses.replace(here, calibration=links), None) == [6]
    for text in ("many", "0", "8..4", "-3"):
        with pytest.raises(ConfigError):
            worker_counts(abci, text)


def test_a_refusal_names_its_reason() -> None:
    with pytest.raises(ConfigError, match="holds 4,352"):
        plan(load_cluster("abci"), workload(), [10_000], Goal())
    with pytest.raises(ConfigError, match="unknown"):
        plan(PRICED, workload(), [64], Goal(), space=Space(algorithms=("thorus",)))


def test_4096_workers_and_a_million() -> None:
    """The limits are those of the product; the measured times are far below (docs/results/planning.md)."""
    began = time.perf_counter()
    large = plan(load_cluster("dgx-a100"), workload(65536, 16), [4096], Goal())
    assert large.num_considered > 200
    huge = plan(load_cluster("dgx-a100"), workload(4_000_000, 4), [1_000_000], Goal())
    assert any("times the workers" in text for text in huge.chosen.warnings)
    assert math.isfinite(huge.chosen.total.high)
    assert time.perf_counter() - began < 60  # a hang is seen; speed is measured elsewhere
