"""The chosen all-reduce by three engines."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest

from megabatch.comm.calibration import AxisCost, Calibration
from megabatch.comm.shape import GridShape, parse_grid
from megabatch.errors import ConfigError
from megabatch.plan import crosscheck
from megabatch.plan.cluster import Cluster, Network, load_cluster
from megabatch.plan.crosscheck import check_plan
from megabatch.plan.simgrid import Answer, Play
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
    axes = (AxisCost("column", 2, 2e-3, 2.5e7), AxisCost("row", 4, 1e-4, 1e9))
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
