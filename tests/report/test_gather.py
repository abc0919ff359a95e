"""All figures, each there or explained."""

from __future__ import annotations

from pathlib import Path

from megabatch.report.figure import Figure, Missing
from megabatch.report.figures.network import NetworkTimes
from megabatch.report.gather import all_figures, network_times
from megabatch.report.run import read_run, read_runs
from tests.report.folders import make_hostile_run, make_run

KEYS = [
    *("accuracy", "loss", "lr", "global_batch_size", "momentum", "images_per_second", "step_split", "ranks"),
    *("all_reduce", "efficiency", "predicted", "noise_scale", "ensemble"),
]


def test_every_figure_is_there_or_explained(tmp_path: Path) -> None:
    for runs in (
        [read_run(make_run(tmp_path / "a"))],
        read_runs([make_run(tmp_path / "b"), make_run(tmp_path / "c", workers=2, grid="1x2")]),
        [read_run(make_hostile_run(tmp_path / "d"))],
    ):
        found = all_figures(runs)
        assert [one.key for one in found] == KEYS
        for one in found:
            assert one.title
            if isinstance(one, Missing):
                assert one.why
            else:
                assert one.caption
                assert all(series.y for series in one.series)


def test_what_is_given_wins_over_what_the_folder_holds(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a"))
    given = NetworkTimes(({"algorithm": "ring", "message_bytes": 8, "seconds": 1.0},))
    assert network_times([run], given) is given
    assert network_times([run], None) == NetworkTimes()
    assert any(isinstance(one, Figure) and one.key == "all_reduce" for one in all_figures([run], given))
