"""The arithmetic of `--check`, and one real check on a small network."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.netlab import NETWORKS, Network, laboratory, unavailable_reason
from benchmarks.netlab.check import (
    Finding,
    check_laboratory,
    column_pairs,
    lateness_quantile_us,
    payload_mbit_per_second,
    render,
)

reason = unavailable_reason()
if reason is None and not Path("/dev/net/tun").exists():
    reason = "no /dev/net/tun here"


def test_the_column_phase_loads_every_nic_once_per_rank_and_leaves_the_host() -> None:
    for network in NETWORKS.values():
        pairs = column_pairs(network)
        stations = network.stations
        assert len(pairs) == network.world_size
        assert all(stations[source].host != stations[destination].host for source, destination in pairs)
        for end in (0, 1):
            counts = [sum(pair[end] == station.index for pair in pairs) for station in stations]
            assert counts == [len(station.ranks) for station in stations]


def test_columns_join_equal_local_ranks_or_rows_of_the_squarest_grid() -> None:
    assert column_pairs(Network(2, 2, nic="rank")) == [(0, 2), (1, 3), (2, 0), (3, 1)]
    assert column_pairs(Network(2, 2, nic="host")) == [(0, 1), (0, 1), (1, 0), (1, 0)]
    assert column_pairs(NETWORKS["equal-hosts"])[:2] == [(0, 4), (1, 5)]
    assert column_pairs(Network(3, 1)) == [(0, 1), (1, 2), (2, 0)]


def test_payload_is_the_rate_without_headers() -> None:
    assert payload_mbit_per_second(Network(2, 1, rate_mbit_per_second=100, mtu=1500)) == pytest.approx(
        96.5333, abs=1e-4
    )


def test_lateness_is_read_from_the_upper_edges_of_the_buckets() -> None:
    assert lateness_quantile_us([0, 0, 0], 0.5) == 0
    assert lateness_quantile_us([10, 0, 0], 0.99) == 1
    assert lateness_quantile_us([50, 49, 0, 1], 0.5) == 1
    assert lateness_quantile_us([50, 49, 0, 1], 0.99) == 2
    assert lateness_quantile_us([50, 49, 0, 1], 1.0) == 8


def test_the_table_marks_what_is_out_of_bounds() -> None:
    text = render("title", [Finding("rate", 50.0, "Mbit/s", 100.0, False), Finding("load", 1.5, "")])
    assert text.splitlines()[0] == "title"
    assert text.splitlines()[1].split() == ["rate", "50.00", "Mbit/s", "100.00", "OUT", "OF", "BOUNDS"]
    assert text.splitlines()[2].split() == ["load", "1.50"]


@pytest.mark.root
@pytest.mark.skipif(reason is not None, reason=str(reason))
def test_a_check_reports_every_quantity_and_no_traffic_of_a_host_on_a_nic() -> None:
    network = Network(2, 2, nic="rank", rate_mbit_per_second=50, latency_ms_one_way=1)
    with laboratory(network, link="forwarder") as lab:
        findings = {finding.name: finding for finding in check_laboratory(lab, seconds=0.2)}
    assert findings["of that, seen by any NIC"].measured == 0
    assert findings["packets dropped anywhere"].measured == 0
    assert findings["column phase, packets forwarded"].measured > 0
    assert findings["echo round trip, idle, median of 50"].measured > 1.8  # a busy machine can only be later
    assert 0 < findings["column phase, slowest NIC"].measured < 60
    assert {finding.unit for finding in findings.values()} == {"", "ms", "Mbit/s", "1/s", "cores", "us", "bytes"}
