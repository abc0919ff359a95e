"""Live SimGrid against the closed form and our own simulation; and what is said where it is missing or fails."""

from __future__ import annotations

import csv
import dataclasses
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from benchmarks.simulators import simgrid
from benchmarks.simulators.simgrid import Play, find_simgrid, play, play_of, simgrid_free_seconds, simgrid_seconds
from benchmarks.simulators.simulate import Round, lock_step_seconds, simulate_all_reduce
from megabatch.comm.phases import Phase, RoundGroup
from megabatch.comm.shape import GridShape, parse_grid
from megabatch.errors import ConfigError
from megabatch.plan.network import price_curve
from tests.plan.laboratory import laboratory, need_simgrid

SIZE = 51.12e6
NETWORK = laboratory().network
# Racks hold 136 workers here: grids of more have to cross their uplinks.
CELLS = (
    *(("ring", "2"), ("ring", "30"), ("ring", "16x16"), ("ring", "1x7"), ("backend", "24"), ("backend", "7x1")),
    *(
        ("torus", "5x12"),
        ("torus", "2x3x4"),
        ("torus", "1x9"),
        ("torus", "9x1"),
        ("torus", "16x16"),
        ("torus", "17x16"),
    ),
    *(("hierarchical", "16x4"), ("hierarchical", "64x4"), ("halving_doubling", "30"), ("halving_doubling", "256")),
    *(("direct", "4x8"), ("exchange", "4x4"), ("exchange", "3x5")),
)


@pytest.mark.parametrize("software_us", [0, 20])
def test_in_step_it_equals_the_closed_form_and_our_own_simulation(software_us: int) -> None:
    need_simgrid()
    network = dataclasses.replace(NETWORK, software_latency=1e-6 * software_us)
    # Messages to many peers leave one after another: software that no simulation here knows of.
    cells = [cell for cell in CELLS if not software_us or cell[0] not in ("direct", "exchange")]
    plays = [play_of(name, parse_grid(grid), SIZE, 4) for name, grid in cells]
    answer = play(network, plays)
    for (name, grid), one, seconds in zip(cells, plays, answer.seconds, strict=True):
        shape = parse_grid(grid)
        own = lock_step_seconds(network, one.channels[0], shape.world_size, SIZE)
        assert seconds == pytest.approx(own, rel=1e-5), (name, grid)
        closed = price_curve(network, name, shape, 4).at(SIZE).seconds
        if (name, grid) == ("halving_doubling", "30"):  # the price lets all ranks halve; here most only hand over
            assert 0.5 * closed < seconds < closed
        else:
            assert seconds == pytest.approx(closed, rel=1e-5), (name, grid)


def test_one_fabric_without_racks() -> None:
    need_simgrid()
    network = dataclasses.replace(NETWORK, nodes_per_rack=0)
    shape = GridShape((20, 10))
    closed = price_curve(network, "torus", shape).at(SIZE).seconds
    assert simgrid_seconds(network, "torus", shape, SIZE) == pytest.approx(closed, rel=1e-5)


def test_the_closed_form_is_above_where_the_longest_path_is_not_the_busiest() -> None:
    """143 workers, 7 of them in a second rack: the transfers that reach it late share their NICs with few."""
    need_simgrid()
    shape = GridShape((13, 11))
    one = play_of("torus", shape, SIZE)
    (seconds,) = play(NETWORK, [one]).seconds
    assert seconds == pytest.approx(lock_step_seconds(NETWORK, one.channels[0], 143, SIZE), rel=1e-5)
    assert 1.003 < price_curve(NETWORK, "torus", shape).at(SIZE).seconds / seconds < 1.005


@pytest.mark.slow
def test_the_stored_results_come_out_again() -> None:
    need_simgrid()
    stored = Path(simgrid.__file__).parent / "simgrid.csv"
    rows = list(csv.DictReader(stored.read_text(encoding="utf-8").splitlines()))
    plays = []
    for row in rows:
        if row["algorithm"] == "nearest_first":
            plays.append(nearest_first(int(row["grid"])))
        else:
            plays.append(play_of(row["algorithm"], parse_grid(row["grid"]), SIZE, 4))
    found = play(NETWORK, plays).seconds
    errors = [1e3 * one / float(row["milliseconds"]) - 1 for one, row in zip(found, rows, strict=True)]
    assert max(map(abs, errors)) <= 1e-3, errors


def nearest_first(ranks: int) -> Play:
    """Halving-doubling that begins with the nearest partner: the largest share stays near."""
    steps = Phase("all_reduce", "halving", -1, ranks).steps()
    nearest = [RoundGroup(1, step.share, distance=ranks // 2 // step.distance) for step in steps]
    swaps = (
        Round(tuple((one, one ^ step.distance) for one in range(ranks)), float(step.share), step.count)
        for step in nearest
    )
    return Play((tuple(swaps),), SIZE)


def test_free_it_equals_our_own_simulation() -> None:
    """Late ranks, other jobs, channels and chains included; inside one rack, where paths are of nearly equal length."""
    need_simgrid()
    late = [3e-4 * (7 * rank % 16) for rank in range(16)]
    cells = [
        ("torus", "8x8", (), ()),
        ("torus", "2x3x4", (), ()),
        ("hierarchical", "6x16", (), ()),
        ("two_way_torus", "4x8", (), ()),
        ("halving_doubling", "30", (), ()),
        ("exchange", "4x4", (), ()),
        ("torus", "4x4", late, ()),
        ("ring", "16", (), [(0, 12)]),
        ("ring", "16", late, [(0, 12), (5, 6)]),
    ]
    plays = []
    for name, grid, starts, others in cells:
        one = play_of(name, parse_grid(grid), SIZE, free=True)
        plays.append(dataclasses.replace(one, start_seconds=tuple(starts), background=tuple(others)))
    answer = play(NETWORK, plays)
    for (name, grid, starts, others), seconds in zip(cells, answer.seconds, strict=True):
        shape = parse_grid(grid)
        own = simulate_all_reduce(NETWORK, name, shape, SIZE, start_seconds=starts, background=others)
        assert seconds == pytest.approx(own, rel=1e-3), (name, grid)


def test_where_paths_of_different_length_share_a_link_the_shorter_get_more() -> None:
    """The one thing in which its shares are not ours: 1.2 % here, nothing when all paths are equally long."""
    need_simgrid()
    shape = GridShape((12, 16))
    closed = price_curve(NETWORK, "direct", shape).at(SIZE).seconds
    assert 1.005 < simgrid_seconds(NETWORK, "direct", shape, SIZE) / closed < 1.02
    level = dataclasses.replace(NETWORK, rack_latency=0.0)
    closed = price_curve(level, "direct", shape).at(SIZE).seconds
    assert simgrid_seconds(level, "direct", shape, SIZE) == pytest.approx(closed, rel=1e-5)


@pytest.mark.slow
def test_free_ranks_of_two_racks() -> None:
    need_simgrid()
    own = simulate_all_reduce(NETWORK, "torus", GridShape((16, 16)), SIZE)
    assert simgrid_free_seconds(NETWORK, "torus", GridShape((16, 16)), SIZE) == pytest.approx(own, rel=0.01)


def test_a_lone_rank_needs_no_time() -> None:
    need_simgrid()
    assert play(NETWORK, [play_of("torus", GridShape((1, 1)), SIZE)]).seconds == (0.0,)


def test_nothing_else_of_debian_comes_along() -> None:
    need_simgrid()
    code = (
        "import sys; before = list(sys.path); from benchmarks.simulators import simgrid_child as child\n"
        "child._load_simgrid(); import numpy; assert sys.path == before; print(numpy.__file__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not done.stdout.startswith(str(simgrid.DEBIAN))


def fails(words: str, most_seconds: float = 30.0) -> None:
    """Playing fails with these words, in one line."""
    with pytest.raises(ConfigError, match=words) as caught:
        play(NETWORK, [play_of("ring", GridShape((4,)), SIZE)], most_seconds=most_seconds)
    assert "\n" not in str(caught.value)


def test_without_simgrid_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simgrid, "find_simgrid", lambda: None)
    fails("not installed for Python 3.*python3-simgrid.*pip install simgrid")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import time; time.sleep(60)", "did not answer within 1 s"),
        ("import os, sys; print('it broke', file=sys.stderr, flush=True); os.abort()", "code -6: it broke"),
        ("import sys; sys.exit('[x/CRITICAL] Uncaught: y\\n  -> 0# backtrace')", "code 1: Uncaught: y"),
        ("print('{}')", "ended with code 0: without a word"),
        ("print('[1]')", "ended with code 0"),
        ('print(\'{"error": "first\\\\nsecond"}\')', "failed .first second.; docs"),
        ("import sys; sys.exit(3)", "ended with code 3"),
    ],
)
def test_a_child_that_hangs_or_breaks_is_one_line(monkeypatch: pytest.MonkeyPatch, code: str, words: str) -> None:
    monkeypatch.setattr(simgrid, "find_simgrid", lambda: "found")
    monkeypatch.setattr(simgrid, "_CHILD", ("-c", code))
    fails(words, 1.0 if "sleep" in code else 30.0)


def test_debians_module_is_found_for_this_python_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(simgrid, "DEBIAN", tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "simgrid.cpython-38-x86_64-linux-gnu.so").touch()
    assert find_simgrid() is None
    (tmp_path / f"simgrid{EXTENSION_SUFFIXES[0]}").touch()
    spec = find_simgrid()
    assert spec is not None
    assert spec.origin == str(tmp_path / f"simgrid{EXTENSION_SUFFIXES[0]}")


def test_a_folder_that_is_called_simgrid_is_not_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "path" / "simgrid").mkdir(parents=True)
    monkeypatch.setattr(simgrid, "DEBIAN", tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "path")])
    assert find_simgrid() is None


def test_what_cannot_be_played_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simgrid, "find_simgrid", lambda: pytest.fail("looked for SimGrid"))
    with pytest.raises(ConfigError, match="774,144 transfers and gets at most 300,000; choose fewer workers"):
        simgrid_seconds(NETWORK, "direct", GridShape((64, 64)), SIZE)
    with pytest.raises(ConfigError, match="33,546,240 transfers"):
        simgrid_free_seconds(NETWORK, "ring", GridShape((4096,)), SIZE)
    with pytest.raises(ConfigError, match="play them free"):
        simgrid_seconds(NETWORK, "two_way_torus", GridShape((4, 4)), SIZE)
