"""A study from its plan to its tables and figures: run what is missing, collect, compare, write, tell."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megabatch.errors import ConfigError, TrainingError
from megabatch.files import write_atomically, write_json
from megabatch.plan.convergence import ConvergenceLaw
from megabatch.report.drawing import has_matplotlib, write_figures
from megabatch.report.figure import Figure
from megabatch.report.run import PAGE_FILE, SUMMARY_FILE, read_json
from megabatch.study.earlier import EarlierRuns, read_earlier
from megabatch.study.figure import by_arm, by_batch_size, by_target, write_page
from megabatch.study.plan import Arm, Study, StudyRun, from_file, from_grid, is_study_file, slug
from megabatch.study.results import ArmResult, arm_rows, arms_table, collect, left_out, statements
from megabatch.study.run import Outcome, evaluate_ensembles, free_cores, has_result, run_all
from megabatch.study.targets import TARGETS_FILE, Arrival, BatchPoint, arrivals_of, laws_of, points_of, target_lines
from megabatch.text import csv_of_tables


@dataclass(frozen=True)
class StudyRequest:
    """What the user typed after `megabatch study`."""

    target: str
    vary: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    seeds: int | None = None
    baseline: str = ""
    num_jobs: int | None = None
    output: Path | None = None
    collect_only: bool = False
    as_json: bool = False
    scale: str = ""
    only: str = ""
    earlier: Path | None = None


def plan_of(request: StudyRequest) -> Study:
    if is_study_file(request.target):
        if request.vary or request.seeds or request.baseline:
            raise ConfigError(
                f"'{request.target}' is a study file with its own arms; --vary, --seeds and --baseline go with a "
                "recipe: leave them out, or change the file"
            )
        return from_file(Path(request.target), request.overrides, request.scale)
    if request.scale:
        raise ConfigError("--scale of a study goes with a study file; scale a recipe by --set, or write a study file")
    return from_grid(request.target, request.vary, request.seeds or 3, request.overrides, request.baseline)


TuneArm = Callable[[Study, Arm, Path, StudyRequest, Callable[[str], None]], Arm]


def conduct(request: StudyRequest, tune_arm: TuneArm | None = None) -> int:
    """Run, collect and tell; 0 when every run is finished, 1 when some failed, 130 when the study was stopped.

    tune_arm: gives the tuned arm, for a file that asks for it (`megabatch.tune.arms`). Arms are then tuned and run one
    after the other, so that a study that is stopped has whole arms; one whose search fails holds up no other.
    """
    study = plan_of(request)
    chosen = [arm.name for arm in study.arms if fnmatchcase(arm.name, request.only or "*")]
    if not chosen:
        names = ", ".join(arm.name for arm in study.arms)
        raise ConfigError(f"--only '{request.only}' fits no arm; arms: {names}")
    output = (request.output or Path("runs") / f"study-{slug(Path(request.target).stem)}").absolute()
    console = Console(stderr=request.as_json, highlight=False, soft_wrap=True)
    planned, earlier = study, read_earlier(request.earlier, study) if request.earlier else {}
    if request.collect_only:
        if tune_arm is not None:
            for arm in planned.arms:
                study = study.with_arm(tune_arm(planned, arm, output, request, print))
        _write_and_tell(study, output, request, console, earlier)
        return 0
    outcomes: list[Outcome] = []
    problems: list[str] = []
    left = 0
    if study.tune is None or tune_arm is None:
        own = [run for run in study.runs() if run.arm in chosen and (run.arm, run.seed) not in earlier]
        outcomes, left = _run(study.title, own, output, request, console)
    else:
        for arm in planned.arms:
            is_wanted = arm.name in chosen and any((arm.name, seed) not in earlier for seed in range(arm.seeds))
            try:
                collecting = replace(request, collect_only=not is_wanted)
                tuned = tune_arm(planned, arm, output, collecting, lambda line: console.print(line, markup=False))
            except TrainingError as error:
                problems.append(str(error))
                continue
            study = study.with_arm(tuned)
            if not is_wanted:
                continue
            own = [run for run in study.runs() if run.arm == arm.name and (run.arm, run.seed) not in earlier]
            ended, left = _run(arm.name, own, output, request, console)
            outcomes += ended
            if left:
                break
    _write_and_tell(study, output, request, console, earlier)
    failed = [outcome for outcome in outcomes if outcome.state == "failed"]
    problems += [f"{outcome.run.arm}, seed {outcome.run.seed}: {outcome.reason}" for outcome in failed]
    for problem in problems:
        print(f"failed: {problem}", file=sys.stderr)
    if left:
        print("stopped with runs to go; the same command goes on with them", file=sys.stderr)
        return 130
    return 1 if problems else 0


def _run(
    title: str, runs: Sequence[StudyRun], output: Path, request: StudyRequest, console: Console
) -> tuple[list[Outcome], int]:
    """Run what is missing; how each ended, and how many are left because the study was stopped."""
    missing = [run for run in runs if not has_result(output / run.key, run)]
    num_jobs = min(request.num_jobs or free_cores(), max(1, len(missing)))
    console.print(
        f"{title}: {len(runs)} runs, {len(runs) - len(missing)} already finished, {num_jobs} at a time, in {output}",
        markup=False,
    )
    with _progress(console, len(missing), output) as tell:
        outcomes = run_all(runs, output, num_jobs, tell)
    ended = {outcome.run.key for outcome in outcomes if outcome.state != "stopped"}
    return outcomes, sum(run.key not in ended for run in missing)


def _write_and_tell(study: Study, output: Path, request: StudyRequest, console: Console, earlier: EarlierRuns) -> None:
    evaluate_ensembles(study, output)
    runs = study.runs()
    results = collect(study, output, earlier)
    if not results:
        console.print("no run has finished yet: nothing to show")
        return
    output.mkdir(parents=True, exist_ok=True)  # all of them may be earlier results
    rows = arm_rows(results, study.margin_points)
    table = arms_table(results, study.margin_points)
    said = [*statements(results, study.margin_points, study.paired), *left_out(study, results)]
    write_atomically(output / "runs.csv", csv_of_tables([asdict(run) for result in results for run in result.runs]))
    write_atomically(output / "arms.csv", csv_of_tables(rows))
    told_targets, arrivals, points, laws = _targets(study, output, results)
    write_atomically(
        output / "table.md", f"# {study.title}\n\n{table}\n" + "\n".join([*said, "", *told_targets]).rstrip() + "\n"
    )
    whole = {"title": study.title, "arms": rows, "statements": said, "runs_planned": len(runs)}
    write_json(output / "study.json", whole)
    num_train = runs[0].config.data.max_train_images or None
    found = [by_arm(results, study.title, study.margin_points), by_batch_size(results, study.title, num_train)]
    found += [by_target(points, laws, study.title, study.target_percent or 0.0)] if points else []
    write_page(output / PAGE_FILE, study.title, said, found, rows)
    drawable = [one for one in found if isinstance(one, Figure)]
    drawn = write_figures(drawable, output, tables=False) if has_matplotlib() else []
    if request.as_json:
        print(json.dumps(whole))
        return
    for line in (table, *said, *told_targets):
        console.print(line, markup=False)
    files = [output / name for name in (PAGE_FILE, "table.md", "arms.csv", "runs.csv")]
    files += [output / TARGETS_FILE] * bool(arrivals) + drawn
    console.print(f"written: {', '.join(path.name for path in files)} in {output}", markup=False)
    if not drawn:
        console.print("no figures: matplotlib is missing; `pip install megabatch[figures]` brings it", markup=False)


def _targets(
    study: Study, output: Path, results: Sequence[ArmResult]
) -> tuple[list[str], list[Arrival], list[BatchPoint], dict[str, ConvergenceLaw | str]]:
    """What a study with a target says about the way to it; writes the table that `megabatch plan --calibrate` reads."""
    if study.target_percent is None:
        return [], [], [], {}
    folders = {(arm.name, seed): output / key for arm in study.arms for seed, key in enumerate(study.runs_of(arm))}
    arrivals = arrivals_of(results, folders, study.target_percent)
    if not arrivals:
        return ["No arm has one batch from beginning to end: nothing is said about the target."], [], [], {}
    write_atomically(output / TARGETS_FILE, csv_of_tables([asdict(arrival) for arrival in arrivals]))
    points = points_of(arrivals)
    laws = laws_of(points)
    return target_lines(points, laws, study.target_percent), arrivals, points, laws


@contextmanager
def _progress(console: Console, total: int, output: Path) -> Iterator[Callable[[Outcome, int], None]]:
    """A line per run that ends; on a terminal also a bar."""
    began, done = time.monotonic(), 0
    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, disable=not console.is_terminal or not total)
    task = bar.add_task("runs", total=total)

    def tell(outcome: Outcome, going: int) -> None:
        nonlocal done
        done += 1
        bar.advance(task)
        result = outcome.reason
        if outcome.state == "finished":
            result = f"top-1 {read_json(output / outcome.run.key / SUMMARY_FILE)['top1']:.2%}"
        left_seconds = (time.monotonic() - began) / done * (total - done)
        console.print(
            f"[{done}/{total}] {outcome.run.arm}, seed {outcome.run.seed}: {outcome.state}, {result} "
            f"({outcome.seconds:.0f} s; {going} going on; about {left_seconds / 60:.0f} min left)",
            markup=False,
        )

    with bar:
        yield tell
