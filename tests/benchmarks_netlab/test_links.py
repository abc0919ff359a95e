"""The words given to tc, and links made of the kernel's own parts."""

from __future__ import annotations

import pytest

from benchmarks.netlab import laboratory, unavailable_reason
from benchmarks.netlab.links import egress_shaper, port_shaper
from benchmarks.netlab.network import Network
from benchmarks.netlab.traffic import round_trip_seconds
from megabatch.errors import CommunicationError

reason = unavailable_reason()


def test_a_port_of_the_kernel_switch_delays_and_shapes() -> None:
    network = Network(2, 1, rate_mbit_per_second=200, latency_ms_one_way=2.5)
    assert port_shaper(network, "port1") == ["dev port1 root netem delay 2500us rate 200000000bit limit 50000"]
    unlimited = Network(2, 1, rate_mbit_per_second=0, latency_ms_one_way=1)
    assert port_shaper(unlimited, "port0") == ["dev port0 root netem delay 1000us limit 50000"]


def test_without_latency_the_kernel_needs_no_netem() -> None:
    network = Network(2, 1, rate_mbit_per_second=100, latency_ms_one_way=0, mtu=1500)
    assert port_shaper(network, "port0") == ["dev port0 root tbf rate 100000000bit burst 3000 limit 16777216"]
    assert port_shaper(Network(2, 1, rate_mbit_per_second=0, latency_ms_one_way=0), "port0") == []


def test_a_station_sends_at_its_rate_in_bursts_of_at_least_two_packets() -> None:
    network = Network(2, 1, mtu=9000)
    assert egress_shaper(network, 100).startswith("dev nic0 root tbf rate 100000000bit burst 25000 ")
    assert egress_shaper(network, 10).startswith("dev nic0 root tbf rate 10000000bit burst 18000 ")
    assert egress_shaper(network, 1000).startswith("dev nic0 root tbf rate 1000000000bit burst 250000 ")


@pytest.mark.root
@pytest.mark.skipif(reason is not None, reason=str(reason))
def test_kernel_links_join_hosts_and_can_be_cut() -> None:
    network = Network(2, 2, nic="rank", rate_mbit_per_second=100, latency_ms_one_way=0)
    with laboratory(network, link="kernel") as lab:
        assert lab.links.kind == "kernel"
        assert len(round_trip_seconds(lab, 0, 3, count=3)) == 3
        assert [nic.sent_packets for nic in lab.nic_counters()] == [3, 0, 0, 3]
        lab.cut_host(1)
        with pytest.raises(CommunicationError, match=r"10\.77\.1\.2 did not answer"):
            round_trip_seconds(lab, 0, 3, count=1, timeout_seconds=0.5)
        lab.join_host(1)
        assert len(round_trip_seconds(lab, 0, 3, count=1)) == 1
