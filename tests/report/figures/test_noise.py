"""Noise scale beside the batch, members beside their ensemble."""

from __future__ import annotations

import json
from pathlib import Path

from megabatch.report.figure import Figure, Missing
from megabatch.report.figures.noise import ensemble, noise_scale
from megabatch.report.run import read_run, read_runs
from tests.report.folders import make_run, row


def test_noise_scale_and_batch_share_an_axis_and_values_below_zero_are_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    lines = [row(1, noise_scale=-5.0), row(2, noise_scale=800.0), row(3, noise_scale=1600.0)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    figure = noise_scale([read_run(folder)])
    assert isinstance(figure, Figure)
    assert figure.series[0].y == (800.0, 1600.0)
    assert figure.series[1].name == "total batch"
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
