"""Where a step's time goes, who is slow, and how throughput grows with workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megabatch.report.figure import Figure, Missing
from megabatch.report.run import read_run, read_runs
from megabatch.report.speed import MAX_RANKS, efficiency, ranks, step_split
from tests.report.folders import make_run, row


def test_parts_add_up_to_the_step(tmp_path: Path) -> None:
    figure = step_split([read_run(make_run(tmp_path / "a"))])
    assert isinstance(figure, Figure)
    parts = {one.name: one.y[0] for one in figure.series}
    assert sum(parts.values()) == pytest.approx(0.1)
    assert parts["rest"] == pytest.approx(0.1 - 0.005 - 0.03 - 0.04 - 0.015 - 0.002)
    assert figure.title.startswith("15.00 % of a step's 100 ms")
    assert {one.n for one in figure.series} == {(95,)}


def test_runs_without_forward_and_backward_show_their_sum(tmp_path: Path) -> None:
    """On an accelerator the host's clock does not tell them apart."""
    folder = make_run(tmp_path / "a")
    lines = [
        {k: v for k, v in row(n).items() if not k.startswith(("forward", "backward", "optim"))} for n in range(1, 20)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    figure = step_split([read_run(folder)])
    assert isinstance(figure, Figure)
    assert {one.name for one in figure.series} == {
        "waiting for data",
        "exposed communication",
        "forward, backward, optimizer",
        "rest",
    }


def test_several_runs_stand_side_by_side(tmp_path: Path) -> None:
    figure = step_split(read_runs([make_run(tmp_path / name) for name in ("a", "b")]))
    assert isinstance(figure, Figure)
    assert all(one.x == ("a", "b") for one in figure.series)


def test_the_slowest_rank_is_named_with_how_much_longer_it_works(tmp_path: Path) -> None:
    figure = ranks([read_run(make_run(tmp_path / "a"))])
    assert isinstance(figure, Figure)
    ratio = (0.005 + 0.04 + 0.04 + 0.002) / (0.005 + 0.03 + 0.04 + 0.002) - 1
    assert figure.title == f"The slowest rank (1) works {100 * ratio:.2f} % longer than the median rank"
    assert figure.series[0].x == ("0", "1", "2", "3")
    assert figure.series[0].n == (97,) * 4


def test_of_many_ranks_the_slowest_and_the_fastest_are_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    table = {"num_steps": 9, "ranks": [{"rank": r, "host": f"h{r}", "forward_seconds": float(r)} for r in range(500)]}
    (folder / "ranks.json").write_text(json.dumps(table))
    figure = ranks([read_run(folder)])
    assert isinstance(figure, Figure)
    assert len(figure.series) == 1  # parts that no rank knows are not drawn as zero
    shown = figure.series[0].x
    assert len(shown) == MAX_RANKS
    assert (shown[0], shown[-1]) == ("499 h499", "0 h0")
    assert "of 500 ranks" in figure.caption


def test_without_times_there_is_a_reason(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", num_steps=3)
    (folder / "ranks.json").unlink()
    for made in (ranks([read_run(folder)]), step_split([read_run(folder)])):
        assert isinstance(made, Missing)
        assert made.why


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
