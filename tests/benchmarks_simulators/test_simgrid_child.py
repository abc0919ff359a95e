"""SimGrid's own process: routes are what we count on, or it says so."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass

import pytest

from benchmarks.simulators import simgrid, simgrid_child
from benchmarks.simulators.fluid import Links
from benchmarks.simulators.simgrid import play, play_of
from benchmarks.simulators.simgrid_child import assert_routes
from megabatch.comm.shape import GridShape
from megabatch.errors import ConfigError
from tests.plan.laboratory import laboratory, need_simgrid

NETWORK = laboratory().network
LINKS = Links(NETWORK, 272)
RATES = {"port": 50e9, "nic": 23e9, "uplink": 34 * 25e9 / 3}
WALK = ("port135_UP", "nic33_UP", "uplink0_UP", "uplink1_DOWN", "nic34_DOWN", "port136_DOWN")


@dataclass
class FakeLink:
    name: str
    bandwidth: float


@dataclass
class FakeHost:
    """A host whose every route is the one given."""

    names: tuple[str, ...]
    latency: float = 7e-6
    factor: float = 1.0

    def route_to(self, _other: object) -> tuple[list[FakeLink], float]:
        links = [FakeLink(name, self.factor * RATES[name.rstrip("_UPDOWN0123456789")]) for name in self.names]
        return links, self.latency


def test_the_walk_of_the_image_is_accepted() -> None:
    assert_routes([FakeHost(WALK)] * 272, LINKS, [(135, 136)])
    inside = FakeHost(("port1_UP", "port2_DOWN"), 2e-6)
    assert_routes([inside] * 272, LINKS, [(1, 2)])


@pytest.mark.parametrize(
    "wrong",
    [
        FakeHost((WALK[0], "nic3_UP", *WALK[2:])),
        FakeHost(WALK[1:-1]),
        FakeHost((*WALK[:3], "uplink1_UP", *WALK[4:])),
        FakeHost((*WALK, WALK[0])),
        FakeHost(WALK, latency=6e-6),
        FakeHost(WALK, factor=1.01),
    ],
)
def test_any_other_route_is_not(wrong: FakeHost) -> None:
    with pytest.raises(ConfigError, match="wrong route from worker 135 to 136"):
        assert_routes([wrong] * 272, LINKS, [(135, 136)])


def test_a_gateway_in_the_wrong_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SimGrid 3.32 gets wrong without a word, built on purpose; worlds of one rack do not show it."""
    need_simgrid()
    code = """
from benchmarks.simulators import simgrid_child as child

def misplace(simgrid, engine, zone, rack):
    place = child._add_zone(simgrid, engine, zone, f"switch{rack}") if child._is_new(zone) else zone
    return child._add(place, "router", f"gateway{rack}")

child.add_rack_gateway = misplace
child.main()
"""
    one_rack, two_racks = (play_of("ring", GridShape((ranks,)), 1e6) for ranks in (136, 256))
    good = play(NETWORK, [one_rack, two_racks])
    monkeypatch.setattr(simgrid, "_CHILD", ("-c", code))
    assert play(NETWORK, [one_rack]).seconds[0] == good.seconds[0]
    # 4.1 finds no route at all.
    words = "wrong route from worker" if good.version.startswith("3.") else "SimGrid failed"
    with pytest.raises(ConfigError, match=words):
        play(NETWORK, [two_racks])


def test_whatever_goes_wrong_is_an_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("no JSON", "{}"):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        monkeypatch.setattr(simgrid_child, "_load_simgrid", lambda: None)
        simgrid_child.main()
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["error"]


def test_a_module_that_cannot_be_loaded_is_an_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise ImportError("libsimgrid.so.4.1: cannot open shared object file")

    monkeypatch.setattr("sys.stdin", io.StringIO('{"network": {}, "plays": []}'))
    monkeypatch.setattr(simgrid_child, "_load_simgrid", broken)
    simgrid_child.main()
    assert "libsimgrid.so.4.1" in json.loads(capsys.readouterr().out.splitlines()[-1])["error"]
