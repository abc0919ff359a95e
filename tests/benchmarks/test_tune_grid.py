"""The comparison of a search with a grid, with the stand-in trainer of the tuning tests instead of training."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.tune_grid import CLOCK, Clock, GridRun, Repeat, grid_rates, kept, plan_of, rows_of, run_grid, search
from tests.system.runs import REPOSITORY
from tests.tune.conftest import toy_trainer

__all__ = ["toy_trainer"]

GENERATED = ("data.source=generated", "data.generated.channels=1", "data.generated.num_train=60_000")
GRID = [GridRun(0.85, 0.85, 160_000), GridRun(1.7, 0.9, 160_000), GridRun(32.0, 0.0, 240)]


def test_the_grid_has_equal_factors_between_its_ends() -> None:
    rates = grid_rates(5)
    assert (rates[0], rates[-1]) == pytest.approx((0.125, 32.0))
    assert [after / before for before, after in pairwise(rates)] == pytest.approx([4.0] * 4)


@pytest.mark.usefixtures("toy_trainer")
def test_a_search_is_held_against_the_grid(tmp_path: Path) -> None:
    """The stand-in's accuracy falls by 5 points for every factor of 2 from 1.7, and a rate above 20 diverges."""
    plan = plan_of(32, *GENERATED)
    grid = run_grid(plan, [0.85, 1.7, 32.0], tmp_path)
    assert [run.top1 for run in grid] == pytest.approx([0.85 - 0.1 / 32, 0.9 - 0.1 / 32, 0.0])
    assert [run.images for run in grid] == [160_000, 160_000, 240]  # twelve steps of 20, then it had diverged
    found, trials = search(plan, 1, 4, grid, tmp_path / "search")
    assert found.points_below_grid >= 0
    assert found.share_of_images == pytest.approx(sum(one["images"] for one in trials) / 320_240)
    assert found.overhead > 0
    rows = rows_of(grid, [(found, trials)])
    assert [row["from"] for row in rows] == ["grid"] * 3 + ["search-1"] * 4
    assert max(row["top1"] for row in rows[3:]) == pytest.approx(
        max(row.top1 for row in grid) - found.points_below_grid / 100
    )
    assert rows[2]["outcome"] == "diverged"


@pytest.mark.usefixtures("toy_trainer")
def test_a_search_goes_on_and_its_clock_with_it(tmp_path: Path) -> None:
    plan = plan_of(32, *GENERATED)
    first, _ = search(plan, 1, 2, GRID, tmp_path)
    with (tmp_path / CLOCK).open("a") as file:
        file.write('{"start": 1, "seco')  # killed while it was written
    second, trials = search(plan, 1, 4, GRID, tmp_path)
    assert len(trials) == 4
    assert second.seconds > first.seconds
    # Nothing is left to run: the same numbers again, and no time that has no run beside it.
    assert search(plan, 1, 4, GRID, tmp_path) == (second, trials)


def test_the_clock_adds_up_what_each_start_noted_last(tmp_path: Path) -> None:
    path = tmp_path / CLOCK
    rows = [{"start": 1, "seconds": 2.0, "spent": 1.0}, {"start": 1, "seconds": 5.0, "spent": 4.0}]
    rows.append({"start": 2, "seconds": 3.0, "spent": 2.0})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"start": 3, "se')
    clock = Clock(path)
    assert clock.read() == (8.0, 6.0)
    clock.note()  # no run has ended
    assert clock.read() == (8.0, 6.0)
    clock.note(1.0)
    assert clock.read()[1] == 7.0


@pytest.mark.usefixtures("toy_trainer")
def test_a_run_that_failed_is_no_rate_of_zero(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"grid/1.7 failed megabatch: no luck; the same command goes on"):
        run_grid(plan_of(32, *GENERATED, "optimizer.momentum=0.5"), [1.7], tmp_path)


def test_what_is_claimed_holds_for_every_repeat_or_not_at_all() -> None:
    good = Repeat(1, 1.7, points_below_grid=0.3, share_of_images=0.4, overhead=0.05, seconds=1.0)
    assert kept([good, good]) == {"points": True, "share_of_images": True, "overhead": True}
    bad = Repeat(2, 1.7, points_below_grid=0.31, share_of_images=0.41, overhead=math.nan, seconds=1.0)
    assert kept([good, bad]) == {"points": False, "share_of_images": False, "overhead": False}


@pytest.mark.slow
@pytest.mark.timeout(900)  # ten trainings start one after another
def test_killed_and_started_again_it_writes_what_it_found(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "benchmarks.tune_grid", "--output", str(tmp_path), "--grid", "2", "--trials", "2"]
    tiny = (*GENERATED, "model.width=4", "data.max_train_images=800", "data.generated.num_train=10_900")
    words += ["--repeats", "1", "--epochs", "4", *(word for one in tiny for word in ("--set", one))]
    process = subprocess.Popen(words, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    while process.poll() is None and not list(tmp_path.glob("search-1/trials/*/*/summary.json")):
        time.sleep(0.05)
    process.kill()
    process.wait(timeout=30)
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "the start of a process is its trial's time" in done.stdout
    found = json.loads((tmp_path / "tune_grid.json").read_text())
    assert len(found["grid"]) == 2
    assert [repeat["seed"] for repeat in found["repeats"]] == [1]
    rows = (tmp_path / "tune_grid.csv").read_text().splitlines()
    assert rows[0] == "from,trial,level,top1,images,outcome"
    assert [row.split(",")[0] for row in rows[1:]] == ["grid", "grid", "search-1", "search-1"]
