"""What binds: the thing whose improvement saves most, by the same model."""

from __future__ import annotations

import dataclasses

import pytest

from megabatch.plan.calibrate import fit_steps
from megabatch.plan.cluster import KNOBS
from megabatch.plan.convergence import mlperf_law
from megabatch.plan.helps import what_would_help
from megabatch.plan.planner import Goal, plan
from megabatch.plan.predict import expected_seconds
from megabatch.plan.quantity import Quantity
from megabatch.plan.search import Space
from megabatch.plan.workload import Workload
from tests.plan.laboratory import laboratory, workload
from tests.plan.test_calibrate import row


def gains(load: Workload, **changes: object) -> dict[str, float]:
    cluster = dataclasses.replace(laboratory(), **changes)  # type: ignore[arg-type]
    return {one.binding: one.gain for one in plan(cluster, load, [1024], Goal()).helps}


def test_gains_are_what_the_model_says() -> None:
    cluster = laboratory()
    result = plan(cluster, workload(), [1024], Goal())
    found = {one.what: one.gain for one in result.helps}
    then = expected_seconds(cluster.changed("NIC", 2.0), workload(), result.chosen.candidate)
    assert found["twice the NIC rate"] == pytest.approx(1 - then / result.chosen.total.middle)
    assert found["compute twice as fast"] > 0.3
    assert [one.gain for one in result.helps] == sorted(found.values(), reverse=True)
    assert result.binding == "compute"
    slow = plan(dataclasses.replace(cluster, initialisation_seconds=Quantity(1e6)), workload(), [1024], Goal())
    assert slow.binding == "initialisation (the training itself by compute)"
    assert len(result.helps) == len(KNOBS) + 1


def test_what_is_slow_binds() -> None:
    assert next(iter(gains(workload(), initialisation_seconds=Quantity(1e6)))) == "initialisation"
    assert next(iter(gains(workload(), loader_images_per_second=Quantity(100.0)))) == "loader"
    assert next(iter(gains(workload(), jitter_seconds=Quantity(1.0)))) == "stragglers"
    # Measured ratios are parts of the compute: halving that halves them, too, so both help much.
    assert gains(workload(), straggler_ratios=(1.0, 1.0, 1.0, 20.0))["stragglers"] > 0.3


def test_a_batch_far_beyond_the_critical_one_is_bound_by_convergence() -> None:
    result = plan(laboratory(), workload(65536), [64], Goal(), batches=[workload(65536).stages], law=mlperf_law())
    gain = {one.binding: one.gain for one in result.helps}
    chosen, law = result.chosen, mlperf_law()
    share = chosen.time_parts["steps"] / chosen.total.middle
    assert gain["convergence at this batch"] == pytest.approx(share * (1 - law.floor_epochs / chosen.epochs.middle))
    assert gain["convergence at this batch"] > 0.4
    assert gain["total batch"] < 0


def test_with_a_fit_compute_and_stragglers_are_of_the_fit() -> None:
    fit = fit_steps([row(8, 408.0), row(64, 51.0)])
    cluster = laboratory(workers_per_node="workers_per_node = 8")
    result = plan(cluster, workload(), [1024], Goal(), fit=fit)
    found = {one.binding: one.gain for one in what_would_help(cluster, workload(), result.chosen, None, fit)}
    parts = result.chosen.step_parts
    share = result.chosen.time_parts["steps"] / result.chosen.total.middle
    assert found["stragglers"] == pytest.approx(0.5 * share * parts["stragglers"] / result.chosen.step.middle, rel=0.02)
    assert found["compute"] > 0.2


def test_with_a_fit_the_network_can_bind() -> None:
    """What rows count as exposed goes with the price of the network: a slow one would gain by faster NICs."""
    fit = fit_steps([row(8, 408.0), row(64, 51.0)]).changed("exposed", 200.0)
    cluster = laboratory(workers_per_node="workers_per_node = 8")
    result = plan(cluster, workload(), [1024], Goal(), fit=fit, space=Space(("backend",)))
    found = {one.binding: one.gain for one in result.helps}
    assert max(found["NIC"], found["latency of the network"], found["rack uplinks"]) > 0.1
