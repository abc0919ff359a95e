"""Cluster files: units, sources, and the mistakes people make in them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from megabatch.comm.calibration import AxisCost, Calibration
from megabatch.errors import ConfigError
from megabatch.machine import usable_cores
from megabatch.plan.cluster import KNOBS
from megabatch.plan.cluster_file import CLUSTERS, cluster_names, load_cluster, read_cluster
from megabatch.plan.compute import empirical_maximum
from tests.plan.laboratory import CLUSTER, laboratory


def test_units_become_bytes_and_seconds() -> None:
    cluster = laboratory()
    network = cluster.network
    assert network.worker_rate == 50e9
    assert network.nic_rate == pytest.approx(2 * 12.5e9 * 0.92)
    assert network.nic_latency == pytest.approx(1.5e-6)
    # The uplinks are what the NICs of a rack could send over 3; protocol efficiency is the NIC's own.
    assert network.rack_rate == pytest.approx(34 * 25e9 / 3)
    gigabits = read_cluster(CLUSTER.replace("gigabytes_per_second = 12.5", "gigabits_per_second = 100"), "x")
    assert gigabits.network.nic_rate == pytest.approx(network.nic_rate)


def test_shipped_clusters_load_and_every_number_says_where_it_comes_from() -> None:
    assert {"abci", "mn1", "stampede2", "dgx-a100", "dgx-h100", "ethernet", "this-machine"} <= set(cluster_names())
    for name in cluster_names():
        cluster = load_cluster(name)
        assert cluster.name == name
        text = (CLUSTERS / f"{name}.toml").read_text(encoding="utf-8")
        for line in text.splitlines():
            if "value =" in line:
                assert "certainty =" in line, line
                assert "source =" in line, line
        if "measured_here" not in text:
            assert cluster.compute.source


RATE_50, LATENCY = "gigabytes_per_second = 50", "latency_microseconds = 1.5"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (RATE_50, "bandwidth = 50", "'bandwidth' in .link.worker. of .* has no unit"),
        (LATENCY, "latency = 1.5", "'latency' in .link.nic. of .* has no unit"),
        (RATE_50, "gigabytes_per_second = -50", "is -50; give a number from 1e-09 to"),
        (RATE_50, "gigabytes_per_second = 0", "is 0; give a number from 1e-09 to"),
        (RATE_50, "gigabytes_per_second = 1e300", r"is 1e\+300; give a number from 1e-09 to 1e\+07"),
        (RATE_50, "gigabytes_per_second = 1" + "0" * 400, "a whole number has more than 64 bits; fix that line"),
        (RATE_50, "", "lacks its rate"),
        (RATE_50, "gigabytes_per_second = 50\ngigabits_per_second = 400", "has both"),
        (LATENCY, "latency_microseconds = 1e300", r"is 1e\+300; give 0 or a number from 1e-06 to 3.6e\+09"),
        ("efficiency = 0.92", "efficiency = 1.2", "from 0.001 to 1"),
        ("efficiency = 0.92", "efficiency = 1e-300", "from 0.001 to 1"),
        ("oversubscription = 3", "oversubscription = 0.5", "from 1 to 10000"),
        ("oversubscription = 3", "oversubscription = 3\nbytes_per_second = 1e9", "both a rate and an oversubscription"),
        ("oversubscription = 3", "", "lacks its rate"),
        ("nodes_per_rack = 34", "", "lacks nodes_per_rack"),
        ("workers_per_node = 4", "workers_per_node = 4.5", "whole number"),
        ("workers_per_node = 4", "workers_per_node = 1000000000000000000", "whole number from 1 to 1e.09"),
        ("workers_per_node = 4", "workers_per_node = 4\nnum_node = 3", "did you mean 'num_nodes'"),
        ("workers_per_node = 4", "workers_per_node = 4\nmeasured_here = true", "both measured_here and step times"),
        ("workers_per_node = 4", "workers_per_node = [", "not valid TOML"),
        ('name = "laboratory"', 'name = "labora\\ntory"', "name of .* give text on one line"),
        ('name = "laboratory"', 'title = "\\u001b[31m"', "title of .* give text on one line"),
        ('name = "laboratory"', "name = 5", "name of .* is 5; give text on one line"),
        ("[link.rack]", "[link.rac]", "did you mean 'rack'"),
        ('"16" = 26.0', '"16" = 260.0', "contradict each other"),
        ('"16" = 26.0', '"0" = 26.0', "not a whole number above 0"),
        ('"16" = 26.0', '"032" = 26.0', "local batch 32 twice"),
        ('"16" = 26.0', '"16" = 1e300', r"is 1e\+300; give a number from 1e-06 to 1e\+09"),
        ("[compute]", "[computes]", "did you mean 'compute'"),
        ("relative_deviation = 0.01", "measured_ratios = [1.0]", "at least 2 items"),
        ("relative_deviation = 0.01", "measured_ratios = []", "at least 2 items"),
        (
            "relative_deviation = 0.01",
            "measured_ratios = [1.0, -1.0]",
            r"ratios.1 of .* is -1.0; give a number from 0.001",
        ),
        ("relative_deviation = 0.01", "relative_deviation = 1e300", "give a number from"),
        ("[straggler]", "[start]\ninitialisation_seconds = 1e30\n[straggler]", r"from 1e-09 to 3.2e\+09"),
        ("[straggler]", "[failures]\ncheckpoint_seconds = 0\n[straggler]", "leave it out to count 20 s"),
        ("[straggler]", "[failures]\nnode_mtbf_hours = 0\n[straggler]", "is 0; give a number from"),
        ("[straggler]", "[price]\nper_node_hour = 0\n[straggler]", "leave .price. out where hours are free"),
        ("[straggler]", '[price]\ncurrency = "E\\nUR"\n[straggler]', "give text on one line"),
        ("[straggler]", "[loader]\nimages_per_second_per_node = 1e300\n[straggler]", "give a number from"),
    ],
)
def test_mistakes_are_one_clear_line(old: str, new: str, words: str) -> None:
    assert old in CLUSTER
    with pytest.raises(ConfigError, match=words) as caught:
        read_cluster(CLUSTER.replace(old, new, 1), "cluster file 'x.toml'")
    assert "\n" not in str(caught.value)
    assert "x.toml" in str(caught.value)


def test_unknown_names_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'abci'"):
        load_cluster("abcy")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_cluster(str(tmp_path / "none.toml"))


def test_a_cluster_refuses_more_workers_than_it_holds() -> None:
    abci = load_cluster("abci")
    abci.check_holds(4352)
    with pytest.raises(ConfigError, match=r"holds 4,352 \(1,088 nodes x 4\)"):
        abci.check_holds(4353)
    assert load_cluster("dgx-a100").max_workers == math.inf


@pytest.mark.parametrize("knob", KNOBS)
def test_knobs_turn_one_thing(knob: str) -> None:
    cluster = laboratory(software="[software]\nlatency_microseconds = 7")
    changed = cluster.changed(knob, 2.0)
    assert cluster.deviation(knob) >= 0
    assert (changed == cluster) == (knob == "loader")  # the laboratory's loader is not known
    assert changed.changed(knob, 0.5).network == cluster.network


def test_a_nic_is_as_uncertain_as_its_rate_its_number_and_its_efficiency() -> None:
    cluster = laboratory()
    # The laboratory gives bare numbers, 10 % each.
    assert cluster.deviation("worker link") == pytest.approx(0.10)
    assert cluster.deviation("NIC") == pytest.approx(0.10 * math.sqrt(3))
    assert cluster.deviation("rack uplink") == pytest.approx(0.10 * math.sqrt(3))  # rate, number, oversubscription
    table = 'efficiency = { value = 0.92, certainty = "assumed" }'
    doubted = read_cluster(CLUSTER.replace("efficiency = 0.92", table), "x")
    assert doubted.deviation("NIC") == pytest.approx(math.hypot(0.10, 0.10, 0.35))
    assert doubted.deviation("rack uplink") == pytest.approx(0.10 * math.sqrt(3))
    alone = read_cluster(CLUSTER.replace("count_per_node = 2\nefficiency = 0.92\n", ""), "x")
    assert alone.deviation("NIC") == pytest.approx(0.10)  # what is not there is exactly one


def test_stragglers_are_as_uncertain_as_the_least_certain_of_their_numbers() -> None:
    assert laboratory().deviation("stragglers") == pytest.approx(0.10)
    jitter = 'relative_deviation = 0.01\ndeviation_milliseconds = { value = 0.7, certainty = "unknown" }'
    assert laboratory(straggler=jitter).deviation("stragglers") == pytest.approx(0.60)
    none = 'relative_deviation = 0.01\ndeviation_milliseconds = { value = 0, certainty = "unknown" }'
    assert laboratory(straggler=none).deviation("stragglers") == pytest.approx(0.10)


def test_measured_ratios_shrink_and_are_as_uncertain_as_they_are_few() -> None:
    random = np.random.default_rng(4)
    ratios = np.exp(0.1 * random.standard_normal(50)).tolist()
    cluster = laboratory(straggler=f"measured_ratios = {ratios}")
    half = cluster.changed("stragglers", 0.5)
    assert np.mean(half.straggler_ratios) == pytest.approx(np.mean(ratios))
    assert np.std(half.straggler_ratios) == pytest.approx(np.std(ratios) / 2)
    # The slowest of N is half as far above the mean, whatever N.
    wait = [empirical_maximum(one.straggler_ratios, 64) - np.mean(ratios) for one in (cluster, half)]
    assert wait[1] == pytest.approx(wait[0] / 2)
    # How much deviations of 50 draws scatter, by drawing them many times.
    draws = random.standard_normal((20_000, 50)).std(axis=1, ddof=1)
    assert cluster.deviation("stragglers") == pytest.approx(draws.std() / draws.mean(), rel=0.03)
    wide = laboratory(straggler="measured_ratios = [0.01, 1.0, 1.0]").changed("stragglers", 1.1)
    assert min(wide.straggler_ratios) == 0


def test_what_the_file_does_not_say_is_named() -> None:
    first = "time lost in the first steps"
    assert laboratory().unknown == ("loader rate", "failures of nodes", "initialisation time", first, "price")
    assert load_cluster("dgx-a100").unknown == ("loader rate",)
    told = (
        CLUSTER
        + """
[loader]
images_per_second_per_node = 5000
[failures]
node_mtbf_hours = 1000000
[start]
initialisation_seconds = 0
first_steps_seconds = 0
[price]
per_node_hour = 1.5
"""
    )
    assert read_cluster(told, "x").unknown == ()


def test_worker_counts() -> None:
    abci = load_cluster("abci")
    assert abci.worker_counts("1024") == [1024]
    assert abci.worker_counts("256,1_024") == [256, 1024]
    assert abci.worker_counts("64..300") == [64, 128, 256, 300]
    assert abci.worker_counts(None)[:2] == [4, 8]
    assert abci.worker_counts(None)[-1] == 4096
    here = load_cluster("this-machine")
    assert here.worker_counts(None)[0] == 1
    assert here.worker_counts(None)[-1] == usable_cores()
    links = Calibration(
        "2x3", 6, "gloo", (AxisCost(1e-4, 1e8, name="column", size=2), AxisCost(1e-4, 1e8, name="row", size=3))
    )
    assert dataclasses.replace(here, calibration=links).worker_counts(None) == [6]
    for text in ("many", "0", "8..4", "-3"):
        with pytest.raises(ConfigError):
            abci.worker_counts(text)
