"""Step times between and beyond the measured batches."""

from __future__ import annotations

import pytest

from megabatch.plan.compute import ComputeTable

TABLE = ComputeTable("resnet50", ((16.0, 0.026), (32.0, 0.050), (64.0, 0.098)))


def test_lines_between_the_points() -> None:
    assert TABLE.seconds(32) == pytest.approx(0.050)
    assert TABLE.seconds(24) == pytest.approx(0.038)
    assert TABLE.deviation(24) == 0
    assert TABLE.warnings(24) == []


def test_beyond_the_table_the_line_goes_on_and_a_warning_says_so() -> None:
    assert TABLE.seconds(128) == pytest.approx(0.194)
    assert TABLE.seconds(8) == pytest.approx(0.014)
    assert TABLE.deviation(8) == pytest.approx(0.04)
    assert TABLE.deviation(256) == pytest.approx(0.08)
    assert "outside the measured table (16 to 64)" in TABLE.warnings(8)[0]


def test_a_picture_never_becomes_faster_than_the_best_measured() -> None:
    steep = ComputeTable("resnet50", ((32.0, 0.020), (64.0, 0.100)))
    assert steep.seconds(8) >= 0.98 * 8 * 0.020 / 32


def test_a_lone_point_has_a_fixed_part() -> None:
    lone = ComputeTable("resnet50", ((100.0, 1.0),))
    assert lone.seconds(100) == pytest.approx(1.0)
    assert lone.seconds(50) == pytest.approx(0.02 + 0.49)
    assert lone.times(2).seconds(50) == pytest.approx(1.02)
