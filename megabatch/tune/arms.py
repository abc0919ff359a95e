"""The arms of a study, each tuned with the same effort before its seeds run (`[tune]` in a study file)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from megabatch.errors import TrainingError
from megabatch.study.conduct import StudyRequest
from megabatch.study.plan import Arm, Study, TuneTable, slug
from megabatch.study.run import free_cores
from megabatch.tune.conduct import Search, need_optuna, write_results
from megabatch.tune.plan import make_plan


def tune_arm(study: Study, arm: Arm, output: Path, request: StudyRequest, say: Callable[[str], None]) -> Arm:
    """The arm with the tuned recipe, if it is to have one; searches what is not searched yet.

    With `--collect` nothing is run: an arm without a finished search stays as it is, and has no finished runs either.

    Raises:
        TrainingError: a search failed or all its trials diverged; what has been run is kept.
        KeyboardInterrupt: it was stopped.
    """
    if study.tune is None or arm.runs_of != arm.name or not (arm.tune or arm.tuned_as):
        return arm
    folder = output / "tune" / slug(arm.tuned_as or arm.name)
    best = folder / "best.toml"
    if not arm.tuned_as and not request.collect_only:
        _tune(arm, study.tune, folder, request, say)
    if not best.is_file():
        if arm.tuned_as and not request.collect_only:
            raise TrainingError(f"arm '{arm.name}' waits for the search of '{arm.tuned_as}', which has found nothing")
        return arm
    taken = study.arm(arm.tuned_as).set if arm.tuned_as else arm.set
    # The scale, the epochs and the changes of the arm that was searched are in its recipe already.
    own = tuple(change for change in arm.set if change not in taken)
    return arm.model_copy(update={"recipe": str(best), "set": own, "scale": "", "epochs": None})


def _tune(arm: Arm, wanted: TuneTable, folder: Path, request: StudyRequest, say: Callable[[str], None]) -> None:
    need_optuna()
    plan = make_plan(
        arm.config(seed=0),
        search=arm.search or wanted.search,
        epochs=wanted.epochs,
        held_out=wanted.held_out,
        rungs=wanted.rungs,
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
