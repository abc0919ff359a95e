"""One step: parts by hand, overlap, stragglers, the loader, and what the cluster does not know."""

from __future__ import annotations

import dataclasses
import math

import pytest

from megabatch.comm.shape import GridShape
from megabatch.errors import ConfigError
from megabatch.plan.compute import expected_maximum
from megabatch.plan.fit import fit_steps
from megabatch.plan.quantity import Quantity
from megabatch.plan.step import Candidate
from tests.plan.laboratory import laboratory, steps, two_layers, workload
from tests.plan.test_fit import row

TORUS = Candidate(1024, "torus", GridShape((32, 32)), 8.0)


def test_the_parts_by_hand() -> None:
    step = steps(laboratory(), workload()).time(TORUS, 32768)
    assert step.local_batch == 32
    assert step.parts["compute"] == pytest.approx(0.0499)
    assert step.parts["stragglers"] == pytest.approx(0.01 * 0.0499 * expected_maximum(1024))
    assert step.parts["loader"] == 0
    assert step.seconds == pytest.approx(sum(step.parts.values()))
    assert step.efficiency == pytest.approx(0.0499 / step.seconds)
    assert step.largest_part == "compute"


def test_one_bucket_hides_nothing_and_the_last_of_several_is_exposed() -> None:
    cluster, shape = laboratory(), GridShape((8, 8))
    load = dataclasses.replace(workload(2048), layers=two_layers(), bytes_per_parameter=4)
    one = steps(cluster, load).exposed(Candidate(64, "ring", shape, math.inf), 0.03)[0]
    assert one == pytest.approx(cluster.all_reduce("ring", shape, 4e6).seconds)
    # 3 MB are ready after a quarter of the backward pass and are gone long before its end: the last MB is exposed.
    two = steps(cluster, load).exposed(Candidate(64, "ring", shape, 2.5), 0.03)[0]
    assert two == pytest.approx(cluster.all_reduce("ring", shape, 1e6).seconds)
    # With hardly any backward pass both are.
    none = steps(cluster, load).exposed(Candidate(64, "ring", shape, 2.5), 1e-9)[0]
    both = cluster.all_reduce("ring", shape, 1e6).seconds + cluster.all_reduce("ring", shape, 3e6).seconds
    assert none == pytest.approx(both, rel=1e-4)


def test_accumulation_computes_more_and_sends_as_much() -> None:
    once = steps(laboratory(), workload()).time(TORUS, 32768)
    thrice = steps(laboratory(), workload()).time(TORUS, 3 * 32768)
    assert thrice.parts["compute"] == pytest.approx(3 * once.parts["compute"])
    assert thrice.parts["exposed communication"] == pytest.approx(once.parts["exposed communication"])
    uneven = steps(laboratory(), workload()).time(TORUS, 32768 + 32)
    assert uneven.local_batch == 64  # one worker has two ghosts, and all wait for it


def test_the_loader_is_a_ceiling() -> None:
    slow = dataclasses.replace(laboratory(), loader_images_per_second=Quantity(1000.0))
    step = steps(slow, workload()).time(TORUS, 32768)
    assert step.seconds - step.parts["stragglers"] == pytest.approx(32768 / 256 / 1000)
    assert step.largest_part == "loader"


def test_jitter_does_not_shrink_with_the_batch() -> None:
    jittery = dataclasses.replace(laboratory(), jitter_seconds=Quantity(0.001))
    small = steps(jittery, workload(16384, 16)).time(TORUS, 16384).parts["stragglers"]
    assert small == pytest.approx(math.hypot(0.01 * 0.026, 0.001) * expected_maximum(1024))


def test_measured_scatter_replaces_the_law() -> None:
    ratios = (1.0, 1.0, 1.0, 1.4)
    measured = dataclasses.replace(laboratory(), straggler_ratios=ratios)
    assert steps(measured, workload()).time(TORUS, 32768).parts["stragglers"] == pytest.approx(0.0499 * (1.4 - 1.1))


def test_a_ghost_too_large_for_the_workers_is_cut_and_told() -> None:
    load = workload(8192, 32)
    step = steps(laboratory(), load).time(TORUS, 8192)
    assert step.local_batch == 8
    assert "ghost batch 32" in " ".join(steps(laboratory(), load).notes(TORUS, 8192))
    assert "outside the measured table" in " ".join(steps(laboratory(), load).warnings(TORUS, 8192))
    with pytest.raises(ConfigError, match="at least 2 are needed"):
        steps(laboratory(), workload(1024, 32)).time(TORUS, 1024)


def test_other_networks_scale_by_work_or_are_refused() -> None:
    load = dataclasses.replace(workload(), model="resnet101", work=2 * workload().work)
    assert steps(laboratory(), load).time(TORUS, 32768).parts["compute"] == pytest.approx(2 * 0.0499)
    assert "scaled to resnet101" in " ".join(steps(laboratory(), load).warnings(TORUS, 32768))
    unknown = dataclasses.replace(load, work=0.0)
    with pytest.raises(ConfigError, match="bench step"):
        steps(laboratory(), unknown).time(TORUS, 32768)


def test_deviation_grows_with_every_unknown() -> None:
    here = steps(laboratory(), workload()).deviation(TORUS, 32768)
    unsure = dataclasses.replace(laboratory().compute, certainty="unknown")
    assert steps(dataclasses.replace(laboratory(), compute=unsure), workload()).deviation(TORUS, 32768) > 2 * here
    fewer = Candidate(16, "torus", GridShape((4, 4)), 8.0)
    assert steps(laboratory(), workload(512)).deviation(fewer, 512) < here


def test_a_fit_to_rows_replaces_the_sum() -> None:
    fit = fit_steps([row(8, 408.0), row(64, 51.0)])
    cluster = laboratory(workers_per_node="workers_per_node = 8")
    backend = Candidate(1024, "backend", GridShape((1, 1024)), 25.0)
    step = steps(cluster, workload(), fit).time(backend, 32768)
    assert step.seconds == pytest.approx(fit.predict(32, 1024, 128).middle)
    torus = steps(cluster, workload(), fit).time(TORUS, 32768)
    assert torus.seconds < step.seconds  # the laboratory's backend is a flat ring


def test_a_rough_price_of_the_backend_is_uncertain_by_half_of_what_it_exposes() -> None:
    cluster = dataclasses.replace(laboratory(), collectives="tree")
    backend = Candidate(1024, "backend", GridShape((1, 1024)), 1.0)
    step = steps(cluster, workload()).time(backend, 32768)
    share = step.parts["exposed communication"] / step.seconds
    assert share > 0.01
    with_it = steps(cluster, workload()).deviation(backend, 32768)
    ring = dataclasses.replace(cluster, collectives="ring")
    assert "rough formula" in " ".join(steps(cluster, workload()).warnings(backend, 32768))
    assert "rough formula" not in " ".join(steps(ring, workload()).warnings(backend, 32768))
    assert "rough formula" not in " ".join(steps(cluster, workload()).warnings(TORUS, 32768))
    monotone = steps(cluster, workload()).deviation(dataclasses.replace(backend, bucket_mb=math.inf), 32768)
    whole = steps(cluster, workload()).time(dataclasses.replace(backend, bucket_mb=math.inf), 32768)
    more = whole.parts["exposed communication"] / whole.seconds
    assert (monotone > with_it) == (more > share)
    assert with_it**2 > (0.5 * share) ** 2


def test_another_network_or_size_is_scaled_with_rows_too() -> None:
    fit = fit_steps([row(8, 408.0), row(64, 51.0)])
    cluster = laboratory(workers_per_node="workers_per_node = 8")
    backend = Candidate(1024, "backend", GridShape((1, 1024)), 25.0)
    here = steps(cluster, workload(), fit).time(backend, 32768).parts["compute"]
    double = dataclasses.replace(workload(), model="resnet101", work=2 * workload().work)
    assert steps(cluster, double, fit).time(backend, 32768).parts["compute"] == pytest.approx(2 * here)
    small = dataclasses.replace(workload(), image_size=112)
    for known in (fit, None):
        whole = steps(cluster, workload(), known).time(backend, 32768).parts["compute"]
        assert steps(cluster, small, known).time(backend, 32768).parts["compute"] == pytest.approx(whole / 4)
        assert "224 pixels" in " ".join(steps(cluster, small, known).warnings(backend, 32768))
    assert steps(cluster, small, fit).deviation(backend, 32768) > steps(cluster, workload(), fit).deviation(
        backend, 32768
    )


def test_with_rows_another_algorithm_is_as_uncertain_as_the_links_it_is_priced_by() -> None:
    fit = fit_steps([row(8, 408.0), row(64, 51.0)])
    cluster = dataclasses.replace(laboratory(workers_per_node="workers_per_node = 8"), collectives="tree")
    unsure = dataclasses.replace(cluster, software_latency=Quantity(2e-5, "unknown"))
    sure = dataclasses.replace(cluster, software_latency=Quantity(2e-5, "measured"))
    ring = Candidate(1024, "ring", GridShape((1, 1024)), 100.0)
    vague, clear = (steps(one, workload(), fit).deviation(ring, 32768) for one in (unsure, sure))
    assert vague > 1.2 * clear
    backend = Candidate(1024, "backend", GridShape((1, 1024)), workload().bucket_mb)
    vague, clear = (steps(one, workload(), fit).deviation(backend, 32768) for one in (unsure, sure))
    assert vague == pytest.approx(clear)


def test_a_loader_that_hardly_binds_may_bind_more() -> None:
    step = steps(laboratory(), workload()).time(TORUS, 32768)
    enough = 1.2 * 32768 / 256 / (step.seconds - step.parts["stragglers"])
    sure, unsure = (
        dataclasses.replace(laboratory(), loader_images_per_second=Quantity(enough, certainty))
        for certainty in ("measured", "unknown")
    )
    assert steps(unsure, workload()).deviation(TORUS, 32768) > 1.2 * steps(sure, workload()).deviation(TORUS, 32768)
    fit = fit_steps([row(8, 408.0), row(64, 51.0)])
    vague, clear = (
        dataclasses.replace(laboratory(), loader_images_per_second=Quantity(500.0, certainty))
        for certainty in ("unknown", "measured")
    )
    with_rows = [steps(one, workload(), fit).deviation(TORUS, 32768) for one in (vague, clear)]
    assert with_rows[0] > 2 * with_rows[1]
