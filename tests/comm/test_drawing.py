"""Phase lists as tables: the same numbers as the phases themselves."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest

from megabatch.comm.calibration import AxisCost, Calibration, MeasuredPoint
from megabatch.comm.drawing import modelled_phases, modelled_points, phases_as_data
from megabatch.comm.phases import ALGORITHMS, phases
from megabatch.comm.price import all_reduce_seconds
from megabatch.comm.shape import parse_grid

POINTS = tuple(MeasuredPoint(name, 4096, 0.5) for name in ("torus", "ring", "backend"))
AXES = (AxisCost("column", 2, 1e-3, 1e7), AxisCost("row", 3, 1e-4, 1e9))


@pytest.mark.parametrize("grid", ["2x3", "1x1", "2x2x2", "1x8"])
def test_tables_say_what_the_phases_say(grid: str) -> None:
    shape = parse_grid(grid)
    tables = json.loads(json.dumps(phases_as_data(shape)))
    assert set(tables) == set(ALGORITHMS)
    for name, rows in tables.items():
        wanted = phases(name, shape)
        assert len(rows) == len(wanted)
        for row, phase in zip(rows, wanted, strict=True):
            assert (row["operation"], row["pattern"], row["axis"]) == (phase.operation, phase.pattern, phase.axis)
            assert Fraction(*row["share"]) == phase.share
            assert Fraction(*row["sent_share"]) == phase.sent_share()
            assert row["num_steps"] == phase.num_steps


def test_modelled_times_are_the_prices_of_the_phases() -> None:
    calibration = Calibration("2x3", 2, "gloo", AXES, POINTS)
    shape, links = calibration.shape, calibration.links(calibration.shape)
    points = modelled_points(calibration, [1024, 4096])
    assert {point["algorithm"] for point in points} == {"torus", "ring"}
    for point in points:
        wanted = all_reduce_seconds(phases(point["algorithm"], shape), shape, links, point["message_bytes"])
        assert point["seconds"] == wanted
    by_phase = modelled_phases(calibration, 4096)
    wanted = all_reduce_seconds(phases("torus", shape), shape, links, 4096)
    assert sum(by_phase["torus"]) == pytest.approx(wanted)


def test_without_measured_axes_nothing_is_modelled() -> None:
    calibration = Calibration("2x3", 2, "gloo", (), POINTS)
    assert modelled_points(calibration, [1024]) == []
    assert modelled_phases(calibration, 1024) == {}
