"""Does `megabatch tune` with pruning find as good a rate as a dense grid with fewer images, and what is its overhead?

    python -m benchmarks.tune_grid [--output runs/tune-grid] [--grid 17] [--trials 14] [--repeats 3] [--json]

One recipe (Nesterov momentum, 8 % of 5,000 images of Fashion-MNIST, 32 epochs), one setting: the level of the rate,
over a factor of 256. The grid trains every rate at full length. A repeat is a search with another seed of the sampler.
Both judge by the same held-out images and train with the same seed, so a rate has one number, whoever asks. The best of
a grid is the luckiest of many too: it is no better known than the search's. Images are those that were trained on, also
by rates that diverged.

Overhead is the time of the search less that of its training processes, over the latter. The start of a process counts
as the trial's time, and so does the fifth of a second until its end is noticed: a trial is a `megabatch train`.

It may be stopped in any way and started again: what is finished in --output is not run again, a run under way goes on
from its checkpoint. The clock of a search that was killed stands at the last run that it noted. Results are written to
--output: `tune_grid.json` has everything, `tune_grid.csv` a row for each run of the grid and each trial.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megabatch.errors import TrainingError
from megabatch.files import append_line, write_atomically, write_json
from megabatch.recipes import load_config
from megabatch.report.run import read_json
from megabatch.study.plan import StudyRun
from megabatch.study.run import Outcome, divergence, run_all
from megabatch.text import csv_of_tables
from megabatch.tune import conduct as tuning
from megabatch.tune.plan import TunePlan, make_plan
from megabatch.tune.space import LEVEL

STUDIES = Path(__file__).parents[1] / "studies"
LOW, HIGH = 0.125, 32.0  # times 0.2: from an eighth of the small batch's rate to four times what linear scaling gives
CLAIMED_POINTS, CLAIMED_SHARE, CLAIMED_OVERHEAD = 0.3, 0.4, 0.05
CLOCK = "clock.jsonl"  # of a search: seconds of its own and of its runs, in a row for each run that ended


@dataclass(frozen=True)
class GridRun:
    """One rate at full length; a rate that diverged has a top-1 of 0."""

    rate: float
    top1: float
    images: int


@dataclass(frozen=True)
class Repeat:
    """One search against the grid; shares are of the grid's images and of the trials' own time."""

    seed: int
    best_rate: float
    points_below_grid: float
    share_of_images: float
    overhead: float
    seconds: float


def grid_rates(count: int) -> list[float]:
    """Equal factors from one end to the other."""
    return [LOW * (HIGH / LOW) ** (place / (count - 1)) for place in range(count)]


def plan_of(epochs: float, *more: str) -> TunePlan:
    changes = ["train.global_batch_size=400", "checkpoint.every_epochs=0", *more]
    recipe = load_config(
        str(STUDIES / "small_batch.toml"), changes, scale=str(STUDIES / "fashion_small.toml"), epochs=epochs
    )
    return make_plan(recipe, search=[f"{LEVEL}={LOW}:{HIGH}:log"], held_out=10_000)


def run_grid(plan: TunePlan, rates: list[float], output: Path) -> list[GridRun]:
    """Held-out top-1 of every rate at full length."""
    runs = [
        StudyRun(f"{rate:.4g}", 0, f"grid/{rate:.4g}", plan.config({LEVEL: rate}, plan.rungs[-1])) for rate in rates
    ]
    for outcome in run_all(runs, output, num_jobs=1):
        if outcome.state not in ("finished", "diverged"):
            raise SystemExit(f"{outcome.run.key} {outcome.state} {outcome.reason}; the same command goes on")
    found = []
    for rate, run in zip(rates, runs, strict=True):
        if (how := divergence(output / run.key, run.config)) is not None:
            found.append(GridRun(rate, 0.0, how.samples))
        else:
            summary = read_json(output / run.key / "summary.json")
            found.append(GridRun(rate, float(summary["top1"]), int(summary["samples"])))
    return found


class Clock:
    """Seconds of a search and of its runs, over all the times that it was started; a kill costs what was not noted."""

    def __init__(self, path: Path) -> None:
        self._path, self._began, self._start, self._spent = path, time.monotonic(), time.time_ns(), 0.0

    def note(self, spent: float = 0.0) -> None:
        """A run has ended that took so long, or what follows the last one."""
        self._spent += spent
        if self._spent:  # a search with nothing left to run has no time to compare
            row = {"start": self._start, "seconds": time.monotonic() - self._began, "spent": self._spent}
            append_line(self._path, json.dumps(row))

    def read(self) -> tuple[float, float]:
        """Seconds of the search, and of its runs."""
        last: dict[int, dict[str, float]] = {}  # row of each start
        for line in self._path.read_text().splitlines() if self._path.exists() else []:
            with contextlib.suppress(ValueError):  # half a line, of one that was killed
                row = json.loads(line)
                last[row["start"]] = row
        return sum(row["seconds"] for row in last.values()), sum(row["spent"] for row in last.values())


def search(
    plan: TunePlan, seed: int, trials: int, grid: Sequence[GridRun], output: Path
) -> tuple[Repeat, list[dict[str, Any]]]:
    """One search, timed, and its trials; goes on where one was interrupted."""
    output.mkdir(parents=True, exist_ok=True)
    clock = Clock(output / CLOCK)
    one = tuning.Search(plan, output, trials, math.inf, lambda line: None, seed)
    note = one._note

    def noting(outcome: Outcome, going: int) -> None:
        note(outcome, going)
        clock.note(outcome.seconds)

    one._note = noting  # type: ignore[method-assign]
    if one.run(num_jobs=1) or one.failed:
        raise SystemExit(f"the search in {output} was stopped {one.failed}; the same command goes on")
    try:
        tuning.write_results(one, "tune_grid", lambda line: None)
    except TrainingError as error:
        raise SystemExit(f"the search in {output} has no result: {error}") from None
    clock.note()
    found = one.result()
    best = found.best
    if best is None or len(best.numbers) < len(plan.rungs):
        raise SystemExit(f"no trial of the search in {output} has ended at full length; give more --trials")
    seconds, spent = clock.read()
    repeat = Repeat(
        seed=seed,
        best_rate=best.values[LEVEL],
        points_below_grid=100 * (max(run.top1 for run in grid) - best.numbers[-1]),
        share_of_images=found.images / sum(run.images for run in grid),
        overhead=seconds / spent - 1 if spent else math.nan,
        seconds=seconds,
    )
    return repeat, found.rows


def rows_of(
    grid: Sequence[GridRun], searches: Sequence[tuple[Repeat, Sequence[dict[str, Any]]]]
) -> list[dict[str, Any]]:
    """A row for each run of the grid and each trial of the searches, with the number of its longest run."""
    rows: list[dict[str, Any]] = [
        {"from": "grid", "trial": number, "level": run.rate, "top1": run.top1, "images": run.images}
        | {"outcome": "finished" if run.top1 else "diverged"}
        for number, run in enumerate(grid)
    ]
    for repeat, trials in searches:
        for one in trials:
            numbers = [value for name, value in one.items() if name.startswith("top1_at_") and value is not None]
            rows.append(
                {"from": f"search-{repeat.seed}", "trial": one["trial"], "level": one[LEVEL]}
                | {"top1": numbers[-1] if numbers else 0.0, "images": one["images"], "outcome": one["outcome"]}
            )
    return rows


def kept(repeats: Sequence[Repeat]) -> dict[str, bool]:
    """Whether every repeat is within what is claimed; a number that is not known is not."""
    return {
        "points": all(one.points_below_grid <= CLAIMED_POINTS for one in repeats),
        "share_of_images": all(one.share_of_images <= CLAIMED_SHARE for one in repeats),
        "overhead": all(one.overhead <= CLAIMED_OVERHEAD for one in repeats),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/tune-grid"))
    parser.add_argument("--grid", type=int, default=17)
    parser.add_argument("--trials", type=int, default=14)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=32.0)
    parser.add_argument("--set", action="append", default=[], help="a setting more, such as data.source=generated")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    plan, output = plan_of(options.epochs, *options.set), options.output.absolute()
    grid = run_grid(plan, grid_rates(options.grid), output)
    searches = [
        search(plan, seed, options.trials, grid, output / f"search-{seed}") for seed in range(1, options.repeats + 1)
    ]
    repeats = [repeat for repeat, _ in searches]
    whole = {
        "epochs": options.epochs,
        "trials": options.trials,
        "held_out_images": plan.trial.data.held_out_images,
        "claimed": {"points": CLAIMED_POINTS, "share_of_images": CLAIMED_SHARE, "overhead": CLAIMED_OVERHEAD},
        "overhead_is": "time of the search less that of its training processes, their start included, over the latter",
        "grid": [vars(run) for run in grid],
        "repeats": [vars(one) for one in repeats],
        "kept": kept(repeats),
    }
    write_json(output / "tune_grid.json", whole)
    write_atomically(output / "tune_grid.csv", csv_of_tables(rows_of(grid, searches)))
    if options.json:
        print(json.dumps(whole))
        return
    for run in grid:
        print(f"grid           level {run.rate:8.4f}   held-out top-1 {run.top1:.2%}")
    for one in repeats:
        print(
            f"search {one.seed}       level {one.best_rate:8.4f}   {one.points_below_grid:+.2f} points below the "
            f"grid's best, {one.share_of_images:.0%} of images, overhead {one.overhead:.1%}"
        )
    print(
        f"claimed: within {CLAIMED_POINTS} points, {CLAIMED_SHARE:.0%} of the images, {CLAIMED_OVERHEAD:.0%} overhead "
        "(the start of a process is its trial's time)"
    )
    print(f"kept:    {', '.join('yes' if one else 'no' for one in kept(repeats).values())}")


if __name__ == "__main__":
    main()
