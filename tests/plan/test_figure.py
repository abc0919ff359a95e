"""The figure: three files, the same bytes each time, all candidates in the table."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from megabatch.plan.estimate import Estimator
from megabatch.plan.figure import draw_plan
from megabatch.plan.search import Goal, plan
from tests.plan.laboratory import laboratory, workload


def test_svg_png_and_the_numbers_behind_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the figure is an extra")
    result = plan(Estimator(laboratory(), workload()), [64, 128], Goal())
    for name in ("one", "two"):
        draw_plan(result, "laboratory", tmp_path / f"{name}.svg")
    for suffix in (".svg", ".png", ".csv"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()
    rows = list(csv.DictReader((tmp_path / "one.csv").read_text(encoding="utf-8").splitlines()))
    assert len(rows) == len(result.candidates)
    assert sum(int(row["chosen"]) for row in rows) == 1
