"""Figures and page: every seed and the right mean are in them, and equal results give equal bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from megabatch.report.drawing import write_figures
from megabatch.report.figure import Figure, Missing
from megabatch.study.compare import spread
from megabatch.study.earlier import RunResult
from megabatch.study.figure import by_arm, by_batch_size, write_page
from megabatch.study.plan import Arm
from megabatch.study.results import ArmResult, arm_rows, compared


def arm(name: str, values: list[float], batch: int, group: str = "") -> ArmResult:
    runs = tuple(RunResult(name, seed, v, 10, 2.0, batch, batch, 1.0, 1, 0) for seed, v in enumerate(values))
    return ArmResult(
        Arm(name=name, recipe="demo", seeds=len(values), against="base", group=group), runs, spread(values)
    )


RESULTS = compared(
    [
        arm("base", [80.0, 80.5, 81.0], 50, "linear"),
        arm("large", [78.0, 79.0, 77.5], 400, "linear"),
        arm("lost", [10.0, 30.0], 800, "linear"),
        arm("ours", [80.2], 400, "ours"),
    ]
)


def test_every_seed_stands_behind_its_arm_and_the_lost_arm_keeps_its_number() -> None:
    figure = by_arm(RESULTS, "title", 0.5)
    linear, ours = figure.series
    assert (linear.name, linear.x, linear.n) == ("linear", ("base", "large", "lost"), (3, 3, 2))
    assert linear.single[0] == pytest.approx((0.8, 0.805, 0.81))
    assert (linear.y[0], linear.low[0], linear.high[0]) == pytest.approx((0.805, 0.8, 0.81))
    assert linear.y[2] == pytest.approx(0.2)
    assert (ours.low, ours.high) == (ours.y, ours.y)  # one seed has no spread
    assert [word for _, word in figure.x.ticks] == ["base", "large", "lost", "ours"]
    assert figure.y.floor == pytest.approx(0.745)
    assert figure.band == pytest.approx((0.8, 0.81))
    assert "band: base +- 0.5 points" in figure.caption


def test_accuracy_by_batch_size_needs_two_sizes_in_a_group() -> None:
    figure = by_batch_size(RESULTS, "title", num_train=5000)
    assert isinstance(figure, Figure)
    assert [word for _, word in figure.x.ticks] == ["50 (1 %)", "400 (8 %)", "800 (16 %)"]
    [line] = figure.series
    assert line.x == (50, 400, 800)
    assert line.y[0] == pytest.approx(0.805)
    assert isinstance(by_batch_size([RESULTS[0], RESULTS[3]], "title"), Missing)


def test_the_page_holds_every_arm_and_what_is_said(tmp_path: Path) -> None:
    figures = [by_arm(RESULTS, "<b>", 0.5), by_batch_size([RESULTS[0]], "<b>")]
    write_page(tmp_path / "report.html", "<b>", ["so & so"], figures, arm_rows(RESULTS, 0.5))
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for text in ("so &amp; so", "1 figure is not here", "Made by <code>megabatch study</code>", "plot-arms", "lost"):
        assert text in page
    assert '<h1 id="claim-title"><b>' not in page


def test_the_same_results_give_the_same_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("one", "two"):
        paths = write_figures([by_arm(RESULTS, "title", 0.5)], tmp_path / name, tables=False)
        assert [path.name for path in paths] == ["arms.svg", "arms.png"]
    for name in ("arms.svg", "arms.png"):
        one, two = ((tmp_path / folder / name).read_bytes() for folder in ("one", "two"))
        assert one == two
        assert len(one) > 5000
