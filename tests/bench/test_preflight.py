"""The map of the world, and a slow line named with its ranks and hosts."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from megabatch.bench.preflight import axis_findings, examine_world, slow_lines, world_map
from megabatch.comm.grid import ProcessGrid
from megabatch.comm.measure import AxisMeasurement
from megabatch.comm.p2p import Link
from megabatch.comm.shape import GridShape
from tests.ranks import run_ranks
from tests.system.runs import REPOSITORY, clean_environment


def _measured(rates: tuple[float, ...], solo: float = 0.0) -> AxisMeasurement:
    lines = tuple((rank, rank + len(rates)) for rank in range(len(rates)))
    return AxisMeasurement(lines, (2e-3,) * len(rates), rates, 0.0, solo)


def test_a_line_below_half_of_the_median_is_slow() -> None:
    assert slow_lines(_measured((10, 9, 11, 4))) == [3]
    assert slow_lines(_measured((10, 9, 11, 5))) == []
    assert slow_lines(_measured((10, 4))) == [1]  # of two, the faster is the measure
    assert slow_lines(_measured((10,))) == []


def test_findings_name_ranks_and_hosts_of_a_slow_line() -> None:
    hosts = ["a"] * 4 + ["b"] * 4
    whole, slow = axis_findings(_measured((10e6, 9e6, 11e6, 4e6)), "column", hosts)
    assert whole == {
        "name": "column",
        "good": False,
        "text": "4 columns of 2 ranks, 2 ms, 4 to 11 MB/s with all at once",
    }
    assert slow["name"] == "slow link"
    assert slow["good"] is False
    assert slow["text"].startswith("column of ranks 3, 7 (hosts a, b) has 4 MB/s, the median column 10")
    (fine,) = axis_findings(_measured((10e6, 9e6), solo=20e6), "column", [])
    assert fine["good"] is True
    assert fine["text"].endswith("one alone is 2.0 times as fast, so they share a link")


def test_the_map_tells_where_ranks_sit() -> None:
    grid, *hosts = world_map(GridShape((2, 4)), ["a"] * 4 + ["b"] * 4, "one host per row")
    assert grid["text"] == "2x4, 8 ranks (one host per row)"
    assert [host["text"] for host in hosts] == [
        "a: ranks 0 to 3 at (0, 0) to (0, 3)",
        "b: ranks 4 to 7 at (1, 0) to (1, 3)",
    ]
    assert all(finding["good"] is None for finding in (grid, *hosts))


def test_rows_that_cross_hosts_are_told() -> None:
    *_, last = world_map(GridShape((2, 4)), ["a", "b"] * 4)
    assert last["name"] == "layout"
    assert last["good"] is False
    assert last["text"].startswith("rows cross hosts though hosts hold several ranks")
    # One rank per host has no choice, and one host has nothing to cross.
    for hosts in ([f"h{rank}" for rank in range(8)], ["a"] * 8, []):
        assert all(finding["good"] is None for finding in world_map(GridShape((2, 4)), hosts))


def test_a_large_map_stays_readable() -> None:
    findings = world_map(GridShape((64, 64)), [f"host{rank // 64}" for rank in range(4096)])
    assert len(findings) == 18
    assert findings[-1]["text"] == "and 48 more hosts"


def _examine(rank: int) -> list[dict[str, Any]]:
    send = Link.send

    def slow_send(self: Link, part: torch.Tensor, to: int, tag: int) -> None:
        if {self.ranks[self.position], self.ranks[to]} == {1, 3}:
            time.sleep(part.numel() * part.element_size() / 0.2e6)
        send(self, part, to, tag)

    grid = ProcessGrid.build("2x2", timeout_seconds=30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Link, "send", slow_send)
        return examine_world(grid, budget_seconds=0.2)


def test_a_slow_cable_is_found_on_real_ranks() -> None:
    answers = run_ranks(4, _examine)
    assert all(answer == answers[0] for answer in answers)
    names = [finding["name"] for finding in answers[0]]
    assert names[0] == "grid"
    assert names.count("column") == names.count("row") == 1
    slow = [finding["text"] for finding in answers[0] if finding["name"] == "slow link"]
    assert any(text.startswith("column of ranks 1, 3 (hosts ") for text in slow)
    assert not any(text.startswith("column of ranks 0, 2") for text in slow)


def test_doctor_under_torchrun_maps_the_world_once() -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "megabatch", "doctor", "--json"],
        cwd=REPOSITORY,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    findings = {finding["name"]: finding["text"] for finding in json.loads(line)}
    assert findings["grid"].startswith("1x2, 2 ranks")
    assert "rank 0 of 2" in findings["launcher"]
    assert "MB/s" in findings["row"]
