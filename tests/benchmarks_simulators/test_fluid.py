"""Fair shares by hand, and transfers played through shared links."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.simulators.fluid import Fluid, Links, fair_rates
from tests.plan.laboratory import laboratory


def test_fair_shares_by_hand() -> None:
    # Two flows on link 0 (10), one of them also on link 1 (2): it gets 2, the other the 8 that are left.
    assert fair_rates([(0,), (0, 1)], np.array([10.0, 2.0])).tolist() == [8.0, 2.0]
    assert fair_rates([(0,), (0,), (0,)], np.array([9.0])).tolist() == [3.0, 3.0, 3.0]
    assert fair_rates([], np.array([9.0])).tolist() == []
    # The textbook case: A over both links, B and C on one each.
    assert fair_rates([(0, 1), (0,), (1,)], np.array([1.0, 2.0])).tolist() == [0.5, 0.5, 1.5]


def test_no_link_is_overfull_and_every_flow_has_a_full_link() -> None:
    random = np.random.default_rng(4)
    for _ in range(20):
        capacities = random.uniform(1, 10, 8)
        paths = [tuple(random.choice(8, size=random.integers(1, 4), replace=False)) for _ in range(12)]
        rates = fair_rates(paths, capacities)
        load = np.zeros(8)
        for path, rate in zip(paths, rates, strict=True):
            for link in path:
                load[link] += rate
        assert np.all(load <= capacities * (1 + 1e-9))
        assert all(any(load[link] > capacities[link] * (1 - 1e-9) for link in path) for path in paths)


def test_transfers_share_and_then_speed_up() -> None:
    fluid = Fluid(np.array([10.0]))
    ends: dict[str, float] = {}
    fluid.start((0,), 0.0, 10.0, "short")
    fluid.start((0,), 0.0, 30.0, "long")
    last = fluid.run(lambda label: ends.__setitem__(label, fluid.now))
    # Both at 5 until 2 s; then 20 bytes are left at 10.
    assert ends == pytest.approx({"short": 2.0, "long": 4.0})
    assert last == pytest.approx(4.0)


def test_latency_and_other_jobs() -> None:
    alone, shared = Fluid(np.array([10.0])), Fluid(np.array([10.0]), background=[(0,)])
    for fluid in (alone, shared):
        fluid.start((0,), 0.5, 10.0, None)
    assert alone.run(lambda _: None) == pytest.approx(1.5)
    assert shared.run(lambda _: None) == pytest.approx(2.5)


def test_paths_through_the_topology() -> None:
    network = laboratory().network
    links = Links(network, 300)
    capacities = links.capacities
    inside, latency = links.path(0, 3)
    assert [capacities[link] for link in inside] == [network.worker_rate] * 2
    assert latency == pytest.approx(2e-6)
    across, latency = links.path(135, 136)
    assert sorted(capacities[link] for link in across) == sorted(
        [network.worker_rate] * 2 + [network.nic_rate] * 2 + [network.rack_rate] * 2
    )
    assert latency == pytest.approx(7e-6)
    assert links.path(0, 4)[1] == pytest.approx(5e-6)
    assert not set(links.path(0, 4)[0]) & set(links.path(4, 0)[0])  # split duplex
