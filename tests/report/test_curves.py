"""Curves over epochs say what the metrics say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megabatch.report import curves
from megabatch.report.curves import MAX_RANKS, efficiency, ensemble, noise_scale, ranks, step_split
from megabatch.report.figure import Figure, Missing
from megabatch.report.run import read_run, read_runs
from tests.report.folders import make_run, row

ALL = [
    curves.accuracy,
    curves.loss,
    curves.lr,
    curves.global_batch_size,
    curves.momentum,
    curves.images_per_second,
]


def figure_of(found: Figure | Missing) -> Figure:
    assert isinstance(found, Figure)
    return found


def test_values_are_those_of_the_rows(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a"))
    rows = [row(step) for step in range(1, 101)]
    loss = figure_of(curves.loss([run]))
    training, validation = loss.series
    assert training.x == tuple(r["epoch"] for r in rows)
    assert training.y == tuple(r["loss"] for r in rows)
    assert validation.x == (1.0, 2.0, 3.0, 4.0)
    batch = figure_of(curves.global_batch_size([run])).series[0]
    assert batch.mark == "steps"
    assert set(batch.y) == {256.0, 512.0}


def test_the_title_says_the_finding_and_the_caption_n_and_spread(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a"))
    assert figure_of(curves.accuracy([run])).title == "Top-1 reached 90.00 % at epoch 4"
    speed = figure_of(curves.images_per_second([run]))
    assert "n = 95" in speed.caption
    assert "first 5 steps left out" in speed.caption


def test_several_runs_share_the_axes_with_a_colour_each(tmp_path: Path) -> None:
    runs = read_runs([make_run(tmp_path / name) for name in ("a", "b")])
    for make in ALL:
        figure = figure_of(make(runs))
        assert [one.name for one in figure.series] == ["a", "b"]
        assert len({one.color for one in figure.series}) == 2


@pytest.mark.parametrize("make", ALL)
def test_every_axis_has_a_unit_or_is_a_count_of_epochs(tmp_path: Path, make: object) -> None:
    figure = figure_of(make([read_run(make_run(tmp_path / "a"))]))  # type: ignore[operator]
    assert figure.x.title == "epoch"
    assert "[" in figure.y.title or figure.key in ("lr", "momentum")  # which have none


@pytest.mark.parametrize("make", ALL)
def test_a_figure_without_data_says_so(tmp_path: Path, make: object) -> None:
    folder = make_run(tmp_path / "a")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    missing = make([read_run(folder)])  # type: ignore[operator]
    assert isinstance(missing, Missing)
    assert "metrics.jsonl" in missing.why


def test_stages_of_the_run_are_marked(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", num_steps=2)
    lines = [row(1, phase="warm-up"), row(2, phase="main")]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [word for _, word in figure_of(curves.loss([read_run(folder)])).marks] == ["warm-up", "main"]


def test_noise_scale_and_batch_share_an_axis_and_values_below_zero_are_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    lines = [row(1, noise_scale=-5.0), row(2, noise_scale=800.0), row(3, noise_scale=1600.0)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    figure = noise_scale([read_run(folder)])
    assert isinstance(figure, Figure)
    assert figure.series[0].y == (800.0, 1600.0)
    assert figure.series[1].name == "global batch"
    assert isinstance(noise_scale([read_run(make_run(tmp_path / "b"))]), Missing)


def test_members_and_their_average(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    summary = json.loads((folder / "summary.json").read_text())
    summary |= {"members": [{"epoch": 2.0, "top1": 0.7}, {"name": "last", "top1": 0.72}, {"top1": None}, 5]}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "ensemble.json").write_text(json.dumps({"ensemble": {"top1": 0.74}}))
    figure = ensemble([read_run(folder)])
    assert isinstance(figure, Figure)
    assert figure.series[0].x == ("epoch 2", "last")
    assert figure.series[0].y == (0.7, 0.72)
    assert figure.series[1].y == (0.74, 0.74)
    assert figure.title == "2 members together reach 74.00 %, the best alone 72.00 %"


def test_comparisons_and_plain_runs_say_why_not(tmp_path: Path) -> None:
    runs = read_runs([make_run(tmp_path / "a"), make_run(tmp_path / "b")])
    for made in (ensemble(runs), noise_scale(runs), ensemble(runs[:1])):
        assert isinstance(made, Missing)


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
