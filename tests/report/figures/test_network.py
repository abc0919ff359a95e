"""All-reduce by size: points measured, lines modelled, one colour per algorithm."""

from __future__ import annotations

from typing import Any

from megabatch.report.figure import Figure, Missing
from megabatch.report.figures.network import NetworkTimes, all_reduce


def cell(algorithm: str, size: int, seconds: float, **extra: Any) -> dict[str, Any]:
    return {"algorithm": algorithm, "message_bytes": size, "seconds": seconds} | extra


def test_points_and_lines_of_an_algorithm_share_a_colour_and_differ_in_tag() -> None:
    measured = (cell("torus", 2048, 2.0), cell("torus", 1024, 1.0), cell("backend", 2048, 3.0))
    figure = all_reduce(NetworkTimes(measured, (cell("torus", 1024, 1.1), cell("torus", 2048, 1.9)), source="x.json"))
    assert isinstance(figure, Figure)
    torus, backend, line = figure.series
    assert (torus.x, torus.y, torus.mark, torus.tag) == ((1024.0, 2048.0), (1.0, 2.0), "points", "measured")
    assert (line.y, line.mark, line.tag, line.color) == ((1.1, 1.9), "line", "simulated", torus.color)
    assert backend.color != torus.color
    assert figure.title == "At 2 KiB torus is fastest, 1.50 times the backend's own"
    assert "x.json" in figure.caption


def test_rows_of_the_bench_bring_p95_and_n() -> None:
    rows = tuple(
        {"algorithm": "ring", "message_bytes": size, "p50_seconds": 1.0, "p95_seconds": 1.5, "iterations": 20}
        for size in (1024, 4096)
    )
    figure = all_reduce(NetworkTimes(rows))
    assert isinstance(figure, Figure)
    assert (figure.series[0].low, figure.series[0].high, figure.series[0].n) == ((1.0, 1.0), (1.5, 1.5), (20, 20))


def test_unusable_rows_are_left_out_and_nothing_usable_is_a_reason() -> None:
    bad: tuple[Any, ...] = (3, {"algorithm": "torus"}, cell("torus", -1, 1.0), cell("torus", 8, 0.0), cell("", 8, 1.0))
    missing = all_reduce(NetworkTimes(bad))
    assert isinstance(missing, Missing)
    assert "megabatch bench allreduce" in missing.why
    figure = all_reduce(NetworkTimes((*bad, cell("<b>new</b>", 8, 1.0))))
    assert isinstance(figure, Figure)
    assert [(one.name, one.color) for one in figure.series] == [("<b>new</b>", "other")]
