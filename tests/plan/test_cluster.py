"""Cluster files: units, sources, and the mistakes people make in them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megabatch.errors import ConfigError
from megabatch.plan.cluster import CLUSTERS, KNOBS, cluster_names, load_cluster, read_cluster
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


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("gigabytes_per_second = 50", "bandwidth = 50", "'bandwidth' in .link.worker. of .* has no unit"),
        ("latency_microseconds = 1.5", "latency = 1.5", "'latency' in .link.nic. of .* has no unit"),
        ("gigabytes_per_second = 50", "gigabytes_per_second = -50", "must be more than 0"),
        ("gigabytes_per_second = 50", "gigabytes_per_second = 0", "must be more than 0"),
        ("gigabytes_per_second = 50", "", "lacks its rate"),
        ("gigabytes_per_second = 50", "gigabytes_per_second = 50\ngigabits_per_second = 400", "has both"),
        ("efficiency = 0.92", "efficiency = 1.2", "give 1 or less"),
        ("oversubscription = 3", "oversubscription = 0.5", "give 1 or more"),
        ("workers_per_node = 4", "workers_per_node = 4.5", "whole number"),
        ("workers_per_node = 4", "workers_per_node = 4\nnum_node = 3", "did you mean 'num_nodes'"),
        ("[link.rack]", "[link.rac]", "links are worker, nic, rack"),
        ('"16" = 26.0', '"16" = 260.0', "contradict each other"),
        ('"16" = 26.0', '"0" = 26.0', "not a whole number above 0"),
        ("[compute]", "[computes]", "no measured step times"),
        ("workers_per_node = 4", "workers_per_node = [", "not valid TOML"),
        ("relative_deviation = 0.01", "measured_ratios = [1.0]", "at least 2 numbers"),
        ("relative_deviation = 0.01", "measured_ratios = [1.0, -1.0]", "more than 0"),
    ],
)
def test_mistakes_are_one_clear_line(old: str, new: str, words: str) -> None:
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
