"""Step times between and beyond the measured batches."""

from __future__ import annotations

import pytest

from megabatch.errors import ConfigError
from megabatch.plan.compute import ComputeTable, check_points, read_compute

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


def test_a_image_never_becomes_faster_than_the_best_measured() -> None:
    steep = ComputeTable("resnet50", ((32.0, 0.020), (64.0, 0.100)))
    assert steep.seconds(8) >= 0.98 * 8 * 0.020 / 32


def test_a_lone_point_has_a_fixed_part() -> None:
    lone = ComputeTable("resnet50", ((100.0, 1.0),))
    assert lone.seconds(100) == pytest.approx(1.0)
    assert lone.seconds(50) == pytest.approx(0.02 + 0.49)
    assert lone.times(2).seconds(50) == pytest.approx(1.02)


def test_the_least_certain_step_time_speaks_for_the_table() -> None:
    rows = {"64": {"value": 98.0, "certainty": "assumed", "source": "guess"}, "32": 49.9}
    table = read_compute({"certainty": "measured", "milliseconds_by_local_batch": rows}, "x")
    assert table.batches == (32, 64)
    assert table.seconds(32) == pytest.approx(0.0499)
    assert table.relative_deviation == 0.35
    rows["64"] = 98.0
    assert read_compute({"certainty": "measured", "milliseconds_by_local_batch": rows}, "x").relative_deviation == 0.03


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (5, "no measured step times"),
        ({"milliseconds_by_local_batch": 5}, "is 5; give at least one batch"),
        ({"milliseconds_by_local_batch": {}}, "give at least one batch"),
        ({"milliseconds_by_local_batch": {"9" * 5000: 5}}, "not a whole number above 0"),
        ({"milliseconds_by_local_batch": {"9999999999": 5}}, "at most 1e.09"),
        ({"milliseconds_by_local_batch": {"32": 5, "032": 5}}, "hold local batch 32 twice; keep one"),
        ({"milliseconds_by_local_batch": {"32": 1e300}}, "give a number from"),
        ({"milliseconds_by_local_batch": {"32": 5}, "backward_share": 1}, "backward_share of x is 1; give a number"),
        ({"milliseconds_by_local_batch": {"32": 5}, "backward_share": {"value": 0.6}}, "give a number from 0.01"),
        ({"milliseconds_by_local_batch": {"32": 5}, "certainty": "sure"}, "choose one of"),
        ({"milliseconds_by_local_batch": {"32": 5}, "model": "a\nb"}, "text on one line"),
        ({"milliseconds_by_local_batch": {"32": 5}, "a\nb": 1}, "unknown keys"),
    ],
)
def test_tables_that_cannot_be(table: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_compute(table, "x")
    assert "\n" not in str(caught.value)


def test_a_fall_within_the_tolerance_is_chance() -> None:
    points = [(64.0, 0.097), (32.0, 0.100)]
    check_points(points, "x", tolerance=0.04)
    with pytest.raises(ConfigError, match="64 images in 97 ms, but 32 in 100 ms; measure again"):
        check_points(points, "x", tolerance=0.02)
