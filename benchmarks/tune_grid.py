"""Does `megabatch tune` with pruning find as good a rate as a dense grid with fewer images, and what is its overhead?

    python -m benchmarks.tune_grid [--output runs/tune-grid] [--grid 17] [--trials 14] [--repeats 3] [--json]

One recipe (Nesterov momentum, 8 % of 5,000 images of Fashion-MNIST, 32 epochs), one setting: the level of the rate,
over a factor of 256. The grid trains every rate at full length. A repeat is a search with another seed of the sampler.
Both judge by the same held-out images and train with the same seed, so a rate has one number, whoever asks. The best of
a grid is the luckiest of many too: it is no better known than the search's.

Overhead is the time of the search less that of its training processes, over the latter. What is finished in --output
is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

from megabatch.recipes import load_config
from megabatch.report.run import read_json
from megabatch.study.plan import StudyRun
from megabatch.study.run import Outcome, run_all
from megabatch.tune import conduct as tuning
from megabatch.tune.plan import TunePlan, make_plan
from megabatch.tune.space import LEVEL

STUDIES = Path(__file__).parents[1] / "studies"
LOW, HIGH = 0.125, 32.0  # times 0.2: from an eighth of the small batch's rate to four times what linear scaling gives
CLAIMED_POINTS, CLAIMED_SHARE, CLAIMED_OVERHEAD = 0.3, 0.4, 0.05


@dataclass(frozen=True)
class Repeat:
    """One search against the grid; shares are of the grid's images and of the trials' own time."""

    seed: int
    best_rate: float
    points_below_grid: float
    share_of_images: float
    overhead: float


def grid_rates(count: int) -> list[float]:
    """Equal factors from one end to the other."""
    return [LOW * (HIGH / LOW) ** (place / (count - 1)) for place in range(count)]


def plan_of(epochs: float, *more: str) -> TunePlan:
    changes = ["train.global_batch_size=400", "checkpoint.every_epochs=0", *more]
    recipe = load_config(
        str(STUDIES / "small_batch.toml"), changes, scale=str(STUDIES / "fashion_small.toml"), epochs=epochs
    )
    return make_plan(recipe, search=[f"{LEVEL}={LOW}:{HIGH}:log"], held_out=10_000)


def run_grid(plan: TunePlan, rates: list[float], output: Path) -> dict[float, float]:
    """Held-out top-1 of every rate at full length; a rate that diverges has 0."""
    runs = [
        StudyRun(f"{rate:.4g}", 0, f"grid/{rate:.4g}", plan.config({LEVEL: rate}, plan.rungs[-1])) for rate in rates
    ]
    run_all(runs, output, num_jobs=1)
    summaries = [output / run.key / "summary.json" for run in runs]
    return {
        rate: float(read_json(path)["top1"]) if path.is_file() else 0.0
        for rate, path in zip(rates, summaries, strict=True)
    }


def search(plan: TunePlan, seed: int, trials: int, grid: dict[float, float], output: Path) -> Repeat:
    """One search from nothing, timed."""
    spent = 0.0
    one = tuning.Search(plan, output, trials, math.inf, lambda line: None, seed)
    note = one._note

    def noting(outcome: Outcome, going: int) -> None:
        nonlocal spent
        spent += outcome.seconds
        note(outcome, going)

    one._note = noting  # type: ignore[method-assign]
    began = time.monotonic()
    one.run(num_jobs=1)
    tuning.write_results(one, "tune_grid", lambda line: None)
    seconds = time.monotonic() - began
    found = one.result()
    best = found.best
    if best is None:
        raise SystemExit(f"no trial of the search in {output} has ended")
    images = found.images
    return Repeat(
        seed=seed,
        best_rate=best.values[LEVEL],
        points_below_grid=100 * (max(grid.values()) - best.numbers[-1]),
        share_of_images=images / (len(grid) * plan.images(plan.rungs[-1])),
        overhead=seconds / spent - 1 if spent else math.nan,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/tune-grid"))
    parser.add_argument("--grid", type=int, default=17)
    parser.add_argument("--trials", type=int, default=14)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=32.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    plan, output = plan_of(options.epochs), options.output.absolute()
    grid = run_grid(plan, grid_rates(options.grid), output)
    repeats = [
        search(plan, seed, options.trials, grid, output / f"search-{seed}") for seed in range(1, options.repeats + 1)
    ]
    if options.json:
        print(json.dumps({"grid": grid, "repeats": [vars(one) for one in repeats]}))
        return
    for rate, top1 in grid.items():
        print(f"grid           level {rate:8.4f}   held-out top-1 {top1:.2%}")
    for one in repeats:
        print(
            f"search {one.seed}       level {one.best_rate:8.4f}   {one.points_below_grid:+.2f} points below the "
            f"grid's best, {one.share_of_images:.0%} of images, overhead {one.overhead:.1%}"
        )
    kept = [
        max(one.points_below_grid for one in repeats) <= CLAIMED_POINTS,
        max(one.share_of_images for one in repeats) <= CLAIMED_SHARE,
        not max(one.overhead for one in repeats) > CLAIMED_OVERHEAD,
    ]
    print(
        f"claimed: within {CLAIMED_POINTS} points, {CLAIMED_SHARE:.0%} of the images, {CLAIMED_OVERHEAD:.0%} overhead"
    )
    print(f"kept:    {', '.join('yes' if one else 'no' for one in kept)}")


if __name__ == "__main__":
    main()
