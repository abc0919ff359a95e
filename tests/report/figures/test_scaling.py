"""Scaling efficiency: relative to the smallest world, with n and spread."""

from __future__ import annotations

from pathlib import Path

import pytest

from megabatch.report.figure import Figure, Missing
from megabatch.report.figures.scaling import efficiency
from megabatch.report.run import read_runs
from tests.report.folders import make_run


def test_efficiency_is_speed_per_worker_over_that_of_the_smallest_world(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "one", workers=1, grid="1x1", speed=1.0),
        make_run(tmp_path / "four", workers=4, speed=3.2),
        make_run(tmp_path / "four-again", workers=4, speed=3.6),
        make_run(tmp_path / "ring", workers=4, speed=2.0, algorithm="ring"),
    ]
    figure = efficiency(read_runs(folders))
    assert isinstance(figure, Figure)
    by_name = {one.name: one for one in figure.series}
    torus = by_name["torus"]
    assert torus.x == (1.0, 4.0)
    assert torus.y == pytest.approx((1.0, 0.85))
    assert torus.low == pytest.approx((1.0, 0.8))
    assert torus.high == pytest.approx((1.0, 0.9))
    assert torus.n == (1, 2)
    assert by_name["ring"].y == pytest.approx((0.5,))
    assert by_name["ideal"].y == (1.0, 1.0)
    assert figure.title == "85.00 % scaling efficiency at 4 workers"


def test_runs_of_one_size_have_no_efficiency(tmp_path: Path) -> None:
    made = efficiency(read_runs([make_run(tmp_path / "a"), make_run(tmp_path / "b")]))
    assert isinstance(made, Missing)
    assert "different numbers of workers" in made.why
