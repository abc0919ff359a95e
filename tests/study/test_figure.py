"""Figures: every seed's point and the right mean are in them, and equal results give equal bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megabatch.study.compare import spread
from megabatch.study.figure import draw_arms, draw_batch_sizes, save
from megabatch.study.plan import Arm
from megabatch.study.results import ArmResult, RunResult, compared

pytest.importorskip("matplotlib")


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


def points(axes: Any) -> set[tuple[float, float]]:
    return {
        (float(x), float(y)) for line in axes.lines for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    }


def test_every_seed_is_a_point_and_the_lost_arm_does_not_squeeze_the_others() -> None:
    (axes,) = draw_arms(RESULTS, "title", 0.5).axes
    shown = points(axes)
    assert {(80.0, 0.22), (80.5, 0.22), (81.0, 0.22), (78.0, 1.22), (79.0, 1.22), (77.5, 1.22), (80.2, 3.22)} <= shown
    assert (80.5, 0.0) in shown  # the mean of the first
    assert min(x for x, _ in shown if x > 1) > 65
    assert "20.0 %, off the scale" in [text.get_text() for text in axes.texts]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["base", "large", "lost", "ours"]


def test_accuracy_by_batch_size_needs_two_sizes_in_a_group() -> None:
    figure = draw_batch_sizes(RESULTS, "title", num_train=5000)
    assert figure is not None
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["50\n1 %", "400\n8 %", "800\n16 %"]
    assert (50.0, 80.5) in points(axes)
    assert axes.get_ylim()[0] > 74  # the lost arm, at the edge, has no bar
    assert draw_batch_sizes([RESULTS[0], RESULTS[3]], "title") is None


def test_the_same_results_give_the_same_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save(draw_arms(RESULTS, "title", 0.5), tmp_path / name)
    for suffix in (".svg", ".png"):
        one, two = ((tmp_path / name).with_suffix(suffix).read_bytes() for name in ("one", "two"))
        assert one == two
        assert len(one) > 5000
