"""Curves over epochs say what the metrics say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megabatch.report import curves
from megabatch.report.curves import ensemble, noise_scale
from megabatch.report.figure import Constant, Figure, Missing
from megabatch.report.run import read_run, read_runs
from tests.report.folders import make_run, row

ALL = [
    curves.accuracy,
    curves.loss,
    curves.lr,
    curves.global_batch_size,
    curves.momentum,
    curves.gradient_norm,
    curves.images_per_second,
]


def figure_of(found: Figure | Constant | Missing) -> Figure:
    assert isinstance(found, Figure)
    return found


def test_values_are_those_of_the_rows(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a"))
    rows = [row(step) for step in range(1, 101)]
    loss = figure_of(curves.loss([run]))
    training, smoothed, validation = loss.series
    assert (training.faint, smoothed.faint, smoothed.x) == (True, False, training.x)
    # 100 steps: the window is 5 steps wide, and narrower at the ends.
    assert smoothed.y[50] == pytest.approx(sum(r["loss"] for r in rows[48:53]) / 5)
    assert smoothed.y[0] == pytest.approx(sum(r["loss"] for r in rows[:3]) / 3)
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
    for make in (one for one in ALL if one is not curves.momentum):
        figure = figure_of(make(runs))
        assert [one.name for one in figure.series] == ["a", "b"]
        assert len({one.color for one in figure.series}) == 2


def test_a_flat_line_becomes_a_sentence(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a"))
    assert curves.momentum([run]) == Constant("momentum", "Momentum", "0.9 in every step")
    other = read_run(make_run(tmp_path / "b", momentum=0.5))
    told = curves.momentum([run, other])
    assert isinstance(told, Constant)
    assert told.text == "a 0.9 in every step; b 0.5 in every step"
    assert isinstance(curves.global_batch_size([run]), Figure)


def test_a_last_step_that_is_cut_does_not_make_a_curve(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", global_batch_size=512)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row(101, global_batch_size=256)) + "\n")
    told = curves.global_batch_size([read_run(folder)])
    assert isinstance(told, Constant)
    assert told.text == "512 in every step but the last, which takes the 256 that are left"
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row(102, global_batch_size=1024)) + "\n")
    assert isinstance(curves.global_batch_size([read_run(folder)]), Figure)


def test_runs_are_compared_by_time_and_by_step(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "a"), make_run(tmp_path / "b")]
    lines = [json.dumps(row(step, wall_seconds=6.0 * step)) + "\n" for step in range(1, 101)]
    (folders[0] / "metrics.jsonl").write_text("".join(lines))
    runs = read_runs(folders)
    by_time, by_step = curves.accuracy_by_time(runs), figure_of(curves.accuracy_by_step(runs))
    assert isinstance(by_time, Figure)
    assert [(one.name, one.x) for one in by_time.series] == [("a", (2.5, 5.0, 7.5, 10.0))]  # b did not record it
    assert [one.x for one in by_step.series] == [(25.0, 50.0, 75.0, 100.0)] * 2
    assert by_step.series[0].y == pytest.approx((0.6, 0.7, 0.8, 0.9))


def test_label_smoothing_is_explained_only_where_it_is(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    assert "smoothed labels" not in figure_of(curves.loss([read_run(folder)])).caption
    config = (folder / "config.toml").read_text().replace("epochs = 4", "epochs = 4\nlabel_smoothing = 0.1")
    (folder / "config.toml").write_text(config)
    assert "label smoothing 0.1" in figure_of(curves.loss([read_run(folder)])).caption
    assert "mixtures of two" not in figure_of(curves.loss([read_run(folder)])).caption
    (folder / "config.toml").write_text(config + "\n[data.augment]\nmixup = 0.2\n")
    assert "mixtures of two" in figure_of(curves.loss([read_run(folder)])).caption


@pytest.mark.parametrize("make", [one for one in ALL if one is not curves.momentum])
def test_every_axis_has_a_unit_or_is_a_count_of_epochs(tmp_path: Path, make: object) -> None:
    figure = figure_of(make([read_run(make_run(tmp_path / "a"))]))  # type: ignore[operator]
    assert figure.x.title == "epoch"
    assert "[" in figure.y.title or figure.key == "lr"  # which have none


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
