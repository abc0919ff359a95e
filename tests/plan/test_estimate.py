"""The whole training: parts that add up, failures by hand, epochs by a law."""

from __future__ import annotations

import dataclasses
import math

import pytest

from megabatch.comm.shape import GridShape
from megabatch.errors import ConfigError, GridError
from megabatch.plan.cluster import KNOBS
from megabatch.plan.convergence import mlperf_law
from megabatch.plan.estimate import Estimator
from megabatch.plan.fit import fit_steps
from megabatch.plan.quantity import Quantity
from megabatch.plan.search import Goal, Space, plan
from megabatch.plan.step import Candidate
from megabatch.plan.workload import Branch, Workload
from tests.plan.laboratory import laboratory, steps, workload
from tests.plan.test_fit import row

TORUS = Candidate(1024, "torus", GridShape((32, 32)), 8.0)


def test_the_parts_add_up() -> None:
    cluster = dataclasses.replace(laboratory(), initialisation_seconds=Quantity(60.0))
    one = Estimator(cluster, workload()).estimate(TORUS)
    assert one.steps == math.ceil(90 * 1_281_167 / 32768)
    step = steps(cluster, workload()).time(TORUS, 32768)
    assert one.time_parts["steps"] == pytest.approx(one.steps * step.seconds)
    assert one.total.middle == pytest.approx(sum(one.time_parts.values()))
    assert one.total.middle - one.training.middle == pytest.approx(60)
    assert one.total.middle == pytest.approx(Estimator(cluster, workload()).total_seconds(TORUS))
    assert one.node_hours.middle == pytest.approx(256 * one.total.middle / 3600)
    assert one.cost is None
    assert one.training.low < one.training.middle < one.training.high
    assert one.images_per_second.middle == pytest.approx(32768 / one.step.middle)


def test_stages_are_priced_as_stages() -> None:
    load = workload("0:32768 30:65536")
    one = Estimator(laboratory(), load).estimate(TORUS)
    wanted = sum(
        number * steps(laboratory(), load).time(TORUS, batch).seconds for batch, number in load.steps_by_stage(90)
    )
    assert one.time_parts["steps"] == pytest.approx(wanted)
    assert one.time_parts["steps"] < Estimator(laboratory(), workload()).estimate(TORUS).time_parts["steps"]


def test_a_collapse_at_the_same_batch_is_as_uncertain_as_its_trunk() -> None:
    """Trunk and branches may have one global batch: each counts, in the time and in the interval."""
    plain = Estimator(laboratory(), workload()).estimate(TORUS)
    collapsed = Estimator(laboratory(), dataclasses.replace(workload(), branches=(Branch(85.0, 5.0),))).estimate(TORUS)
    assert collapsed.steps > plain.steps
    spread, wanted = (one.training.high / one.training.low for one in (collapsed, plain))
    assert spread == pytest.approx(wanted, rel=0.01)


def test_uncertain_prices_and_starts_are_in_the_intervals() -> None:
    sure, unsure = Quantity(10.0, "measured"), Quantity(10.0, "unknown")
    priced, vague = (
        Estimator(dataclasses.replace(laboratory(), price_per_node_hour=price), workload()).estimate(TORUS).cost
        for price in (sure, unsure)
    )
    assert priced is not None
    assert vague is not None
    assert vague.high / vague.low > 2 * priced.high / priced.low
    short, long = (
        Estimator(dataclasses.replace(laboratory(), initialisation_seconds=start.times(100)), workload())
        .estimate(TORUS)
        .total
        for start in (sure, unsure)
    )
    assert long.high / long.low > 1.5 * short.high / short.low


def test_every_stage_has_its_own_uncertainty() -> None:
    """A short stage far outside the measured table adds its part; the interval is not that of the main stage alone."""
    load = workload("0:32768 30:65536", ghost=32)
    torus = Candidate(2048, "torus", GridShape((32, 64)), 8.0, 16)
    one = Estimator(laboratory(), load).estimate(torus)
    seconds = {batch: steps(laboratory(), load).time(torus, batch).seconds for batch in (32768, 65536)}
    deviations = {batch: steps(laboratory(), load).deviation(torus, batch) for batch in seconds}
    counts = dict(load.steps_by_stage(90))
    whole = sum(counts[batch] * seconds[batch] for batch in seconds)
    wanted = sum(counts[batch] * seconds[batch] * deviations[batch] for batch in seconds) / whole
    assert len(set(deviations.values())) == 2
    share = one.time_parts["steps"] / one.training.middle
    assert math.log(one.training.high / one.training.middle) / 1.2816 == pytest.approx(wanted * share, rel=1e-3)


def test_what_would_take_a_century_is_refused() -> None:
    slow = dataclasses.replace(laboratory(), jitter_seconds=Quantity(1e6))
    with pytest.raises(ConfigError, match="years; check the numbers"):
        Estimator(slow, workload()).estimate(TORUS)


def test_a_target_takes_the_epochs_of_the_law() -> None:
    law = mlperf_law()
    one = Estimator(laboratory(), workload(), law).estimate(TORUS)
    assert one.epochs.middle == pytest.approx(law.at(32768).epochs)
    assert one.epochs.low < one.epochs.middle
    plain = Estimator(laboratory(), workload()).estimate(TORUS)
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
    assert Estimator(cluster, workload()).failure_seconds(nodes, month) / month == pytest.approx(
        20 / every + every / 2 / between, rel=0.01
    )
    assert Estimator(cluster, workload()).failure_seconds(nodes, 122) < 0.1
    assert Estimator(laboratory(), workload()).failure_seconds(nodes, month) == 0
    hopeless = dataclasses.replace(cluster, node_mtbf_seconds=Quantity(3600.0))
    with pytest.raises(ConfigError, match="no progress is possible"):
        Estimator(hopeless, workload()).failure_seconds(nodes, month)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(GridError, match="needs 1024 workers but the world has 1000"):
        Estimator(laboratory(), workload()).estimate(dataclasses.replace(TORUS, workers=1000))
    small = dataclasses.replace(laboratory(), num_nodes=10)
    with pytest.raises(ConfigError, match="holds 40"):
        Estimator(small, workload()).estimate(TORUS)
    with pytest.raises(ConfigError, match="make 0 steps"):
        Estimator(laboratory(), workload(epochs=1e-6)).estimate(TORUS)


def gains(load: Workload, **changes: object) -> dict[str, float]:
    cluster = dataclasses.replace(laboratory(), **changes)  # type: ignore[arg-type]
    return {one.binding: one.gain for one in plan(Estimator(cluster, load), [1024], Goal()).sensitivity}


def test_gains_are_what_the_model_says() -> None:
    cluster = laboratory()
    result = plan(Estimator(cluster, workload()), [1024], Goal())
    found = {one.what: one.gain for one in result.sensitivity}
    then = Estimator(cluster.changed("NIC", 2.0), workload()).total_seconds(result.chosen.candidate)
    assert found["twice the NIC rate"] == pytest.approx(1 - then / result.chosen.total.middle)
    assert found["compute twice as fast"] > 0.3
    assert [one.gain for one in result.sensitivity] == sorted(found.values(), reverse=True)
    assert result.binding == "compute"
    slow = plan(
        Estimator(dataclasses.replace(cluster, initialisation_seconds=Quantity(1e6)), workload()), [1024], Goal()
    )
    assert slow.binding == "initialisation (the training itself by compute)"
    assert len(result.sensitivity) == len(KNOBS) + 1


def test_what_is_slow_binds() -> None:
    assert next(iter(gains(workload(), initialisation_seconds=Quantity(1e6)))) == "initialisation"
    assert next(iter(gains(workload(), loader_images_per_second=Quantity(100.0)))) == "loader"
    assert next(iter(gains(workload(), jitter_seconds=Quantity(1.0)))) == "stragglers"
    # Measured ratios are parts of the compute: halving that halves them, too, so both help much.
    assert gains(workload(), straggler_ratios=(1.0, 1.0, 1.0, 20.0))["stragglers"] > 0.3


def test_a_batch_far_beyond_the_critical_one_is_bound_by_convergence() -> None:
    result = plan(
        Estimator(laboratory(), workload(65536), mlperf_law()), [64], Goal(), batches=[workload(65536).stages]
    )
    gain = {one.binding: one.gain for one in result.sensitivity}
    chosen, law = result.chosen, mlperf_law()
    share = chosen.time_parts["steps"] / chosen.total.middle
    assert gain["convergence at this batch"] == pytest.approx(share * (1 - law.floor_epochs / chosen.epochs.middle))
    assert gain["convergence at this batch"] > 0.4
    assert gain["global batch"] < 0


def test_with_a_fit_compute_and_stragglers_are_of_the_fit() -> None:
    fit = fit_steps([row(8, 408.0), row(64, 51.0)])
    cluster = laboratory(workers_per_node="workers_per_node = 8")
    result = plan(Estimator(cluster, workload(), fit=fit), [1024], Goal())
    found = {one.binding: one.gain for one in Estimator(cluster, workload(), fit=fit).sensitivity(result.chosen)}
    parts = result.chosen.step_time.parts
    share = result.chosen.time_parts["steps"] / result.chosen.total.middle
    assert found["stragglers"] == pytest.approx(0.5 * share * parts["stragglers"] / result.chosen.step.middle, rel=0.02)
    assert found["compute"] > 0.2


def test_with_a_fit_the_network_can_bind() -> None:
    """What rows count as exposed goes with the price of the network: a slow one would gain by faster NICs."""
    fit = fit_steps([row(8, 408.0), row(64, 51.0)]).changed("exposed", 200.0)
    cluster = laboratory(workers_per_node="workers_per_node = 8")
    result = plan(Estimator(cluster, workload(), fit=fit), [1024], Goal(), space=Space(("backend",)))
    found = {one.binding: one.gain for one in result.sensitivity}
    assert max(found["NIC"], found["latency of the network"], found["rack uplinks"]) > 0.1
