"""The description of a network: stations, addresses, names and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.netlab.network import NETWORKS, Network, named_network
from megabatch.errors import ConfigError


def test_a_nic_per_host_makes_one_station_of_all_its_ranks() -> None:
    stations = Network(hosts=3, ranks_per_host=2, nic="host").stations
    assert [(s.index, s.host, s.address, s.ranks) for s in stations] == [
        (0, 0, "10.77.0.1", (0, 1)),
        (1, 1, "10.77.1.1", (2, 3)),
        (2, 2, "10.77.2.1", (4, 5)),
    ]


def test_a_nic_per_rank_makes_a_station_of_every_rank() -> None:
    network = Network(hosts=2, ranks_per_host=2, nic="rank")
    assert [(s.host, s.address, s.ranks) for s in network.stations] == [
        (0, "10.77.0.1", (0,)),
        (0, "10.77.0.2", (1,)),
        (1, "10.77.1.1", (2,)),
        (1, "10.77.1.2", (3,)),
    ]
    assert [s.index for s in network.neighbours(network.stations[2])] == [3]


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS.keys())
def test_every_rank_is_served_by_the_station_that_lists_it(network: Network) -> None:
    assert network.world_size == 16
    assert len({s.address for s in network.stations}) == len(network.stations)
    for rank in range(network.world_size):
        assert rank in network.station_of_rank(rank).ranks
        assert network.station_of_rank(rank).host == rank // network.ranks_per_host


def test_the_named_networks_are_those_of_the_results_table() -> None:
    table = {
        "shared-nic": (4, 4, "host", 200, 2),
        "nic-per-rank": (4, 4, "rank", 100, 2),
        "equal-hosts": (16, 1, "host", 100, 5),
    }
    for name, (hosts, ranks, nic, rate, latency) in table.items():
        network = named_network(name)
        assert (network.hosts, network.ranks_per_host, network.nic) == (hosts, ranks, nic)
        assert (network.rate_mbit_per_second, network.latency_ms_one_way) == (rate, latency)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'shared_nic'.*choose one of shared-nic.*did you mean 'shared-nic'"):
        named_network("shared_nic")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hosts": 0}, "hosts is 0"),
        ({"hosts": 251}, "hosts is 251"),
        ({"ranks_per_host": 0}, "ranks_per_host is 0"),
        ({"mtu": 100}, "mtu is 100"),
        ({"rate_mbit_per_second": -1}, "rate_mbit_per_second is -1"),
        ({"latency_ms_one_way": -1}, "latency_ms_one_way is -1"),
        ({"nic": "both"}, "nic is 'both'"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(change: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {"hosts": 2, "ranks_per_host": 2} | change
    with pytest.raises(ConfigError, match=words) as caught:
        Network(**arguments)
    assert "\n" not in str(caught.value)
