"""The whole training: parts that add up, failures by hand, epochs by a law."""

from __future__ import annotations

import dataclasses
import math

import pytest

from megabatch.comm.shape import GridShape
from megabatch.errors import ConfigError, GridError
from megabatch.plan.convergence import mlperf_law
from megabatch.plan.predict import expected_seconds, failure_seconds, predict
from megabatch.plan.quantity import Quantity
from megabatch.plan.step import Candidate, step_deviation, step_time
from megabatch.plan.workload import Branch
from tests.plan.laboratory import laboratory, workload

TORUS = Candidate(1024, "torus", GridShape((32, 32)), 8.0)


def test_the_parts_add_up() -> None:
    cluster = dataclasses.replace(laboratory(), initialisation_seconds=Quantity(60.0))
    one = predict(cluster, workload(), TORUS)
    assert one.steps == math.ceil(90 * 1_281_167 / 32768)
    step = step_time(cluster, workload(), TORUS, 32768)
    assert one.time_parts["steps"] == pytest.approx(one.steps * step.seconds)
    assert one.total.middle == pytest.approx(sum(one.time_parts.values()))
    assert one.total.middle - one.training.middle == pytest.approx(60)
    assert one.total.middle == pytest.approx(expected_seconds(cluster, workload(), TORUS))
    assert one.node_hours.middle == pytest.approx(256 * one.total.middle / 3600)
    assert one.cost is None
    assert one.training.low < one.training.middle < one.training.high
    assert one.images_per_second.middle == pytest.approx(32768 / one.step.middle)


def test_stages_are_priced_as_stages() -> None:
    load = workload("0:32768 30:65536")
    one = predict(laboratory(), load, TORUS)
    wanted = sum(
        number * step_time(laboratory(), load, TORUS, batch).seconds for batch, number in load.steps_by_stage(90)
    )
    assert one.time_parts["steps"] == pytest.approx(wanted)
    assert one.time_parts["steps"] < predict(laboratory(), workload(), TORUS).time_parts["steps"]


def test_a_collapse_at_the_same_batch_is_as_uncertain_as_its_trunk() -> None:
    """Trunk and branches may have one total batch: each counts, in the time and in the interval."""
    plain = predict(laboratory(), workload(), TORUS)
    collapsed = predict(laboratory(), dataclasses.replace(workload(), branches=(Branch(85.0, 5.0),)), TORUS)
    assert collapsed.steps > plain.steps
    spread, wanted = (one.training.high / one.training.low for one in (collapsed, plain))
    assert spread == pytest.approx(wanted, rel=0.01)


def test_uncertain_prices_and_starts_are_in_the_intervals() -> None:
    sure, unsure = Quantity(10.0, "measured"), Quantity(10.0, "unknown")
    priced, vague = (
        predict(dataclasses.replace(laboratory(), price_per_node_hour=price), workload(), TORUS).cost
        for price in (sure, unsure)
    )
    assert priced is not None
    assert vague is not None
    assert vague.high / vague.low > 2 * priced.high / priced.low
    short, long = (
        predict(dataclasses.replace(laboratory(), initialisation_seconds=start.times(100)), workload(), TORUS).total
        for start in (sure, unsure)
    )
    assert long.high / long.low > 1.5 * short.high / short.low


def test_every_stage_has_its_own_uncertainty() -> None:
    """A short stage far outside the measured table adds its part; the interval is not that of the main stage alone."""
    load = workload("0:32768 30:65536", ghost=32)
    torus = Candidate(2048, "torus", GridShape((32, 64)), 8.0, 16)
    one = predict(laboratory(), load, torus)
    steps = {batch: step_time(laboratory(), load, torus, batch).seconds for batch in (32768, 65536)}
    deviations = {batch: step_deviation(laboratory(), load, torus, batch) for batch in steps}
    counts = dict(load.steps_by_stage(90))
    whole = sum(counts[batch] * steps[batch] for batch in steps)
    wanted = sum(counts[batch] * steps[batch] * deviations[batch] for batch in steps) / whole
    assert len(set(deviations.values())) == 2
    share = one.time_parts["steps"] / one.training.middle
    assert math.log(one.training.high / one.training.middle) / 1.2816 == pytest.approx(wanted * share, rel=1e-3)


def test_what_would_take_a_century_is_refused() -> None:
    slow = dataclasses.replace(laboratory(), jitter_seconds=Quantity(1e6))
    with pytest.raises(ConfigError, match="years; check the numbers"):
        predict(slow, workload(), TORUS)


def test_a_target_takes_the_epochs_of_the_law() -> None:
    law = mlperf_law()
    one = predict(laboratory(), workload(), TORUS, law=law)
    assert one.epochs.middle == pytest.approx(law.at(32768).epochs)
    assert one.epochs.low < one.epochs.middle
    plain = predict(laboratory(), workload(), TORUS)
    assert one.training.high / one.training.low > 1.003 * plain.training.high / plain.training.low


def test_young_and_daly_by_hand() -> None:
    nodes, year = 864, 365.25 * 86400
    cluster = dataclasses.replace(
        laboratory(),
        node_mtbf_seconds=Quantity(5 * year),
        checkpoint_seconds=Quantity(20.0),
        restart_seconds=Quantity(0.0),
    )
    between = 5 * year / nodes
    assert between / 3600 == pytest.approx(51, abs=1)
    every = math.sqrt(2 * 20 * between) - 20
    assert every / 60 == pytest.approx(45, abs=1)
    month = 30 * 86400.0
    assert failure_seconds(cluster, nodes, month) / month == pytest.approx(20 / every + every / 2 / between, rel=0.01)
    assert failure_seconds(cluster, nodes, 122) < 0.1
    assert failure_seconds(laboratory(), nodes, month) == 0
    hopeless = dataclasses.replace(cluster, node_mtbf_seconds=Quantity(3600.0))
    with pytest.raises(ConfigError, match="no progress is possible"):
        failure_seconds(hopeless, nodes, month)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(GridError, match="needs 1024 workers but the world has 1000"):
        predict(laboratory(), workload(), dataclasses.replace(TORUS, workers=1000))
    small = dataclasses.replace(laboratory(), num_nodes=10)
    with pytest.raises(ConfigError, match="holds 40"):
        predict(small, workload(), TORUS)
    with pytest.raises(ConfigError, match="make 0 steps"):
        predict(laboratory(), workload(epochs=1e-6), TORUS)
