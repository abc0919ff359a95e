"""The chosen all-reduce by three engines."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Sequence

import pytest
from rich.console import Console

from benchmarks import check_plan as crosscheck
from benchmarks.check_plan import CheckedBucket, Crosscheck, check_plan, print_check
from benchmarks.simulators.simgrid import Answer, Play
from megabatch.comm.calibration import AxisCost, Calibration
from megabatch.comm.shape import GridShape, parse_grid
from megabatch.errors import ConfigError
from megabatch.plan.cluster import Cluster
from megabatch.plan.cluster_file import load_cluster
from megabatch.plan.network import Network
from megabatch.plan.step import Candidate
from tests.plan.laboratory import laboratory, need_simgrid, workload


def candidate(algorithm: str, grid: str, bucket_mb: float = 25.0) -> Candidate:
    shape = parse_grid(grid)
    return Candidate(shape.world_size, algorithm, shape, bucket_mb)


@pytest.mark.parametrize(
    ("algorithm", "grid", "mode", "within"),
    [
        ("torus", "16x16", "in step", 1e-5),
        ("hierarchical", "6x8", "free", 1e-3),
        ("two_way_torus", "4x8", "free", 0.06),
    ],
)
def test_three_engines_agree(algorithm: str, grid: str, mode: str, within: float) -> None:
    need_simgrid()
    check = check_plan(laboratory(), workload(), candidate(algorithm, grid))
    assert sum(one.count * one.num_bytes for one in check.buckets) == pytest.approx(2 * 25.557e6, rel=1e-3)
    assert {one.mode for one in check.buckets} == {mode}
    for one in check.buckets:
        assert abs(one.error) <= within
        assert one.simulation_seconds == pytest.approx(one.simgrid_seconds, rel=1e-3)


def test_each_size_of_bucket_is_played_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Play] = []

    def pretend(network: Network, plays: Sequence[Play]) -> Answer:
        asked.extend(plays)
        return Answer(tuple(2.0 for _ in plays), "0.0")

    monkeypatch.setattr(crosscheck, "play", pretend)
    check = check_plan(laboratory(), workload(), candidate("torus", "4x4", 4.0))
    assert len(asked) == len(check.buckets) < sum(one.count for one in check.buckets)
    assert [one.message_bytes for one in asked] == sorted({one.num_bytes for one in check.buckets}, reverse=True)
    data = check.as_data()
    assert data["simgrid_version"] == "0.0"
    first = data["buckets"][0]
    assert first["error"] == pytest.approx(first["closed_form_seconds"] / 2.0 - 1)
    assert first["simulation_seconds"] == pytest.approx(first["closed_form_seconds"], rel=1e-3)
    # Chains are played free while they are few, then in step; one bucket of everything is one play.
    modes = [
        check_plan(laboratory(), workload(), candidate("hierarchical", grid, math.inf)) for grid in ("4x4", "256x4")
    ]
    assert [[one.mode for one in each.buckets] for each in modes] == [["free"], ["in step"]]


def test_what_has_no_phases_on_links_is_refused() -> None:
    axes = (AxisCost(2e-3, 2.5e7, name="column", size=2), AxisCost(1e-4, 1e9, name="row", size=4))
    measured = dataclasses.replace(laboratory(), calibration=Calibration("2x4", 2, "gloo", axes))
    refused: list[tuple[Cluster, Candidate, str]] = [
        (laboratory(), Candidate(1, "backend", GridShape((1, 1)), 25.0), "1 worker, which reduces nothing"),
        (measured, candidate("torus", "2x4"), "measured axes"),
        (load_cluster("dgx-a100"), candidate("backend", "8x8"), "without phases to play; name another"),
        (laboratory(), candidate("direct", "64x64"), "choose fewer workers"),
        (laboratory(), candidate("two_way_torus", "64x64"), "choose fewer workers"),
    ]
    for cluster, one, words in refused:
        with pytest.raises(ConfigError, match=words) as caught:
            check_plan(cluster, workload(), one)
        assert "\n" not in str(caught.value)


def test_a_check_fits_the_terminal() -> None:
    console = Console(width=80, soft_wrap=True, file=io.StringIO())
    buckets = (
        CheckedBucket(25 << 20, 3, "in step", 1.2, 1.25, 1.0),
        CheckedBucket(5 << 18, 12, "free", 1e-3, 1e-3, 1e-3),
    )
    print_check(Crosscheck(buckets, "3.32.0"), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for words in ("SimGrid 3.32.0", "25.00 MB", "1,200.000 ms", "+20.000%", "in step", "1.25 MB", "+0.000%"):
        assert words in text
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "\u2026" not in text


def test_the_command_plans_checks_and_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = CheckedBucket(1 << 20, 2, "in step", 1.0, 1.0, 1.0)
    monkeypatch.setattr(crosscheck, "check_plan", lambda *_: Crosscheck((bucket,), "9.9"))
    words = ["goyal2017", "--cluster", "abci", "--workers", "8"]
    crosscheck.main([*words, "--json"])
    assert json.loads(capsys.readouterr().out)["buckets"][0]["simgrid_seconds"] == 1.0
    crosscheck.main(words)
    assert "Checked with SimGrid 9.9" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="unknown recipe"):
        crosscheck.main(["nobody", "--cluster", "abci"])
