"""The arms of a study, each tuned with the same effort before its seeds run (`[tune]` in a study file)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megabatch.errors import TrainingError
from megabatch.study.conduct import StudyRequest
from megabatch.study.plan import Arm, Study, TuneTable, slug
from megabatch.study.run import free_cores
from megabatch.tune.conduct import Search, need_optuna, write_results
from megabatch.tune.plan import make_plan


def tune_arms(study: Study, output: Path, request: StudyRequest, say: Callable[[str], None]) -> Study:
    """The study with the tuned recipe in every arm that has runs of its own; searches what is not searched yet.

    With `--collect` nothing is run: an arm without a finished search stays as it is, and has no finished runs either.

    Raises:
        TrainingError: a search failed or all its trials diverged; what has been run is kept.
        KeyboardInterrupt: it was stopped.
    """
    if study.tune is None:
        return study
    arms = []
    for arm in study.arms:
        folder = output / "tune" / slug(arm.name)
        if arm.runs_of == arm.name and not request.collect_only:
            _tune(arm, study.tune, folder, request, say)
        best = folder / "best.toml"
        arms.append(_with_recipe(arm, best) if arm.runs_of == arm.name and best.is_file() else arm)
    return replace(study, arms=tuple(arms))


def _tune(arm: Arm, wanted: TuneTable, folder: Path, request: StudyRequest, say: Callable[[str], None]) -> None:
    need_optuna()
    plan = make_plan(
        arm.config(seed=0), search=wanted.search, epochs=wanted.epochs, held_out=wanted.held_out, rungs=wanted.rungs
    )
    say(f"tuning '{arm.name}': {wanted.trials} trials, in {folder}")
    search = Search(plan, folder, wanted.trials, math.inf, say)
    stopped = search.run(request.num_jobs or free_cores())
    if stopped:
        say("stopped; the same command goes on")
        raise KeyboardInterrupt
    if search.failed:
        raise TrainingError(f"tuning of arm '{arm.name}' failed: {search.failed}; see to it, the same command goes on")
    try:
        write_results(search, arm.name, lambda line: None)
    except TrainingError as error:
        raise TrainingError(f"tuning of arm '{arm.name}': {error}") from None


def _with_recipe(arm: Arm, best: Path) -> Arm:
    """The arm with the recipe that its search wrote: the changes, the scale and the epochs are in it already."""
    return arm.model_copy(update={"recipe": str(best), "set": (), "scale": "", "epochs": None})
