"""The planner's benchmark: its sources are read, and its claims hold."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from benchmarks import planner
from benchmarks.planner import (
    emulated_errors,
    live_errors,
    paper_rows,
    simgrid_errors,
    simulation_errors,
    system_errors,
)
from tests.plan.laboratory import need_simgrid


def test_arithmetic_claims() -> None:
    assert max(abs(error) for _, error in simgrid_errors()) <= 0.005
    assert max(abs(error) for _, error in simulation_errors()) <= 0.001


def test_live_simgrid() -> None:
    need_simgrid()
    closed, free = live_errors().values()
    assert statistics.median(abs(error) for _, error in closed) <= 0.001
    assert max(abs(error) for _, error in closed) <= 0.02
    assert max(abs(error) for _, error in free) <= 0.02


def test_without_simgrid_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "find_simgrid", lambda: None)
    assert live_errors() == {}


def test_cluster_files_alone_are_near_real_systems() -> None:
    errors = [abs(error) for _, error in system_errors()]
    assert len(errors) == 6
    assert statistics.median(errors) <= 0.06
    assert max(errors) <= 0.15


def test_papers_have_an_interval_each() -> None:
    rows = paper_rows()
    assert len(rows) == 9
    assert all(row["low"] < row["predicted"] < row["high"] for row in rows)


def test_the_page_of_measurements_is_read() -> None:
    page = """
- net (4 hosts): column 2.00 ms, 80 Mbit/s shared by 2; row 1.00
  ms, 800 Mbit/s / column 4.00 ms, 40 Mbit/s; row 1.00 ms, 800 Mbit/s

| net | 1 MB | torus | 100.0 [99.0-101.0]; 200.0 [1.0-300.0] |
| net | 1 MB | backend | 1.0 [1.0-1.0] |
| loopback | 1 MB | torus | 1.0 [1.0-1.0] |
"""
    (first, one), (second, two) = emulated_errors(page)
    assert (first, second) == ("net 1 MB torus, run 1", "net 1 MB torus, run 2")
    assert -0.9 < one < 9
    assert two != one
    real = Path(__file__).parents[2] / "docs/results/allreduce.md"
    assert len(emulated_errors(real.read_text(encoding="utf-8"))) >= 20
