"""A search from its plan to best.toml: run what is missing, note what came out, write, tell.

OUTPUT/journal.log                  every trial: values, numbers, cost; hosts share it
OUTPUT/trials/0007/rung-0/          run folder of the first, shortest run of trial 7
OUTPUT/best.toml                    the recipe with the best values
OUTPUT/table.md, trials.csv, tune.json, report.html, figures/
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from megabatch.errors import ConfigError, TrainingError
from megabatch.files import write_atomically, write_json
from megabatch.recipes import load_config
from megabatch.report.drawing import has_matplotlib, write_figures
from megabatch.report.run import PAGE_FILE, SUMMARY_FILE, read_json
from megabatch.study.plan import StudyRun, slug
from megabatch.study.run import Outcome, divergence, free_cores, is_finished, run_side_by_side
from megabatch.text import csv_of_tables, read_seconds, seconds_text
from megabatch.tune.plan import TunePlan, make_plan
from megabatch.tune.space import with_values

if TYPE_CHECKING:
    from megabatch.tune.journal import HeldTrial, Journal
    from megabatch.tune.results import SearchResult


@dataclass(frozen=True)
class TuneRequest:
    """What the user typed after `megabatch tune`."""

    recipe: str
    overrides: tuple[str, ...] = ()
    search: tuple[str, ...] = ()
    trials: int | None = None
    budget: str = ""
    scale: str | None = None
    epochs: float | None = None
    held_out: int | None = None
    rungs: int | None = None
    metric: str = "top1"
    num_jobs: int | None = None
    output: Path | None = None
    seed: int = 0
    as_json: bool = False


def conduct(request: TuneRequest) -> int:
    """Search and tell; 0 when the trials or the budget are used up, 1 when a run failed, 130 when it was stopped."""
    if request.trials is None and not request.budget:
        raise ConfigError("tune needs to know when to stop and nothing says so; add --trials N or --budget TIME")
    budget_seconds = read_seconds(request.budget, "--budget") if request.budget else math.inf
    need_optuna()
    recipe = load_config(request.recipe, list(request.overrides), scale=request.scale)
    name = Path(request.recipe).stem
    output = (request.output or Path("runs") / f"tune-{slug(name)}").absolute()
    console = Console(stderr=request.as_json, highlight=False, soft_wrap=True)
    plan = make_plan(
        recipe,
        search=request.search,
        epochs=request.epochs,
        held_out=request.held_out,
        rungs=request.rungs,
        metric=request.metric,
    )

    def say(line: str) -> None:
        console.print(line, markup=False)

    search = Search(plan, output, request.trials, budget_seconds, say, request.seed)
    for line in opening_lines(plan, output):
        say(line)
    stopped = search.run(request.num_jobs or free_cores())
    whole = write_results(search, name, say)
    if request.as_json:
        print(json.dumps(whole))
    if search.failed:
        print(f"failed: {search.failed}; see to it, the same command goes on", file=sys.stderr)
        return 1
    if stopped:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130
    return 0


def need_optuna() -> None:
    """Refuse in one line when the extra is missing."""
    if find_spec("optuna") is None:
        raise ConfigError("tune searches with Optuna, which is not installed; pip install megabatch[tune]")


def opening_lines(plan: TunePlan, output: Path) -> list[str]:
    data = plan.trial.data
    lengths = ", ".join(f"{rung.epochs:.4g}" for rung in plan.rungs)
    return [
        f"images         {plan.num_train:,} to train on, {data.held_out_images:,} held out of the same set to judge by",
        f"lengths        {lengths} epochs",
        *(f"search         {one.text}" for one in plan.space),
        f"folder         {output}",
    ]


@dataclass
class Search:
    """The trials of one process; others may work on the same journal."""

    plan: TunePlan
    output: Path
    max_trials: int | None
    budget_seconds: float
    say: Callable[[str], None]
    seed: int = 0
    failed: str = ""
    journal: Journal = field(init=False)

    def __post_init__(self) -> None:
        from megabatch.tune.journal import Journal

        self.journal = Journal(self.output, self.plan, self.seed)
        self._going: dict[str, HeldTrial] = {}  # by key of its run
        self._ready: list[HeldTrial] = []  # their next run can begin

    def run(self, num_jobs: int) -> bool:
        """Search until trials or budget are used up; True when it was stopped."""
        try:
            return run_side_by_side(self._next_run, self.output, num_jobs, self._note)
        finally:
            for held in (*self._going.values(), *self._ready):
                held.close()

    def _next_run(self) -> StudyRun | None:
        if self.failed:
            return None
        while True:
            held = (
                self._ready.pop(0) if self._ready else self.journal.next_trial(self._wants_another(), self._startup())
            )
            if held is None:
                return None
            run = self._run_of(held)
            if not is_finished(self.output / run.key, run):
                self._going[run.key] = held
                return run
            self._end_rung(held, run)  # it ended just before an interruption

    def _run_of(self, held: HeldTrial) -> StudyRun:
        config = self.plan.config(held.values, self.plan.rungs[held.rung])
        return StudyRun(f"trial {held.number}", config.train.seed, f"trials/{held.number:04d}/rung-{held.rung}", config)

    def _startup(self) -> int:
        """Trials before the sampler takes over: a third of all, at least two per setting as far as they go."""
        wanted = 2 * len(self.plan.space) + 1
        return (
            wanted if self.max_trials is None else min(max(wanted, self.max_trials // 3), max(2, self.max_trials // 2))
        )

    def _wants_another(self) -> bool:
        trials = self.journal.trials()
        if self.max_trials is not None and len(trials) >= self.max_trials:
            return False
        if math.isinf(self.budget_seconds) or not trials:
            return True
        images, seconds, reserved = self._cost()
        if not images:
            return False  # the first run tells how long a trial takes
        one = self._images_of_trial() * seconds / images
        if one > self.budget_seconds:
            raise ConfigError(
                f"--budget {seconds_text(self.budget_seconds)} is less than a trial takes, about {seconds_text(one)}; "
                "give more, or fewer --epochs in another --output; what has been run is kept"
            )
        return seconds + reserved * seconds / images + one <= self.budget_seconds

    def _images_of_trial(self) -> int:
        return sum(self.plan.images(rung) for rung in self.plan.rungs)

    def _cost(self) -> tuple[int, float, int]:
        """Images and seconds of all trials so far, and the images that those under way may still take."""
        found = self.result()
        under_way = [one for one in found.trials if one.outcome == "under way"]
        return found.images, found.seconds, sum(max(0, self._images_of_trial() - one.images) for one in under_way)

    def result(self) -> SearchResult:
        """What the trials so far came to."""
        from megabatch.tune.results import SearchResult, read_trials

        return SearchResult(self.plan, read_trials(self.journal.trials()))

    def _note(self, outcome: Outcome, going: int) -> None:
        held = self._going.pop(outcome.run.key)
        if outcome.state == "finished":
            self._end_rung(held, outcome.run)
        elif (how := divergence(self.output / outcome.run.key, outcome.run.config)) is not None:
            self.journal.diverged(held, how.samples, how.wall_seconds)
            self._tell(held, "diverged", going)
        else:
            held.close()
            if outcome.state == "failed":
                self.failed = self.failed or f"trial {held.number}: {outcome.reason}"

    def _end_rung(self, held: HeldTrial, run: StudyRun) -> None:
        summary, rung = read_json(self.output / run.key / SUMMARY_FILE), self.plan.rungs[held.rung]
        value = summary.get(self.plan.metric)
        cost = int(summary["samples"]), float(summary["wall_seconds"])
        if not isinstance(value, int | float) or not math.isfinite(value) or not _is_finite(summary.get("val_loss")):
            self.journal.diverged(held, *cost)
            self._tell(held, "diverged", len(self._going))
            return
        goes_on = self.journal.report(held, float(value), *cost)
        if goes_on:
            self._ready.append(held)
        how = "goes on" if goes_on else "finished" if held.rung == len(self.plan.rungs) else "pruned"
        shown = f"{value:.4f}" if self.plan.metric == "val_loss" else f"{value:.2%}"
        self._tell(held, f"{self.plan.metric} {shown} after {rung.epochs:.3g} epochs, {how}", len(self._going))

    def _tell(self, held: HeldTrial, what: str, going: int) -> None:
        values = ", ".join(f"{key.rpartition('.')[2]} {value:.3g}" for key, value in held.values.items())
        of_all = f" of 0 to {self.max_trials - 1}" if self.max_trials else ""
        self.say(f"trial {held.number}{of_all}: {what} ({values}; {going} going on)")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def write_results(search: Search, name: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Write everything that a search leaves behind, and say the most important of it.

    Raises:
        TrainingError: all trials diverged.
    """
    from megabatch.tune.figure import write_page

    plan, output, found = search.plan, search.output, search.result()
    if not found.trials:
        return {}
    rows, said, best, table = found.rows, found.statements, found.best, found.table
    write_atomically(output / "trials.csv", csv_of_tables(rows))
    write_atomically(
        output / "table.md", f"# Tuning {name}\n\n{table}\n" + "\n".join(f"- {one}" for one in said) + "\n"
    )
    drawn = write_page(output / PAGE_FILE, name, found)
    if has_matplotlib():
        write_figures(drawn, output / "figures")
    whole: dict[str, Any] = {
        "recipe": name,
        "metric": plan.metric,
        "held_out_images": plan.trial.data.held_out_images,
        "digest": plan.digest,
        "search": [one.text for one in plan.space],
        "epochs": [rung.epochs for rung in plan.rungs],
        "trials": rows,
        "best": None if best is None else {"trial": best.number, "value": best.numbers[-1], "values": best.values},
        "good_ranges": [vars(one) for one in found.good_ranges],
        "importance": found.importance,
        "images": found.images,
        "images_without_pruning": found.images_of_all,
        "seconds": found.seconds,
        "statements": said,
    }
    if best is not None:
        write_atomically(output / "best.toml", with_values(plan.recipe, best.values).to_toml())
        whole["best_recipe"] = str(output / "best.toml")
    write_json(output / "tune.json", whole)
    if problem := found.all_diverged:
        raise TrainingError(problem)
    for line in (table, *said):
        say(line)
    say(f"written: {'best.toml, ' if best else ''}table.md, trials.csv, tune.json, report.html in {output}")
    if best is not None:
        say(f"next: megabatch train {output / 'best.toml'}")
    return whole
