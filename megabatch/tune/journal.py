"""The journal of a search: an Optuna study in one file that several hosts append to.

The first trial is the recipe as it is. Quasi-random trials follow (a scrambled Sobol sequence: they leave no gaps that
independent draws would), then Optuna's TPE sampler, which goes where trials were good and knows those under way.

Who works on a trial holds a lock on the trial's folder. The lock ends with its process however that ends, so a trial
that the journal calls running and whose lock is free was interrupted: whoever comes next continues it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, QMCSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from megabatch.config import differences
from megabatch.errors import CheckpointError, MegabatchError
from megabatch.files import lock
from megabatch.recipes import config_from_toml
from megabatch.tune.plan import REDUCTION, TunePlan
from megabatch.tune.space import Dimension, own_values

JOURNAL = "journal.log"
_LOCK_SECONDS = 60.0
_STUDY = "megabatch"


@dataclass
class HeldTrial:
    """A trial that this process works on; `close` lets others have it."""

    trial: Trial
    values: dict[str, float]
    rung: int  # the next to run
    _held: ExitStack

    @property
    def number(self) -> int:
        return self.trial.number

    def close(self) -> None:
        self._held.close()


class Journal:
    """The trials of one plan, in `folder`.

    Raises:
        CheckpointError: the journal there is that of another plan.
    """

    def __init__(self, folder: Path, plan: TunePlan, seed: int = 0) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.plan, self._seed = folder, plan, seed
        path = folder / JOURNAL
        with self._alone():
            try:
                storage = JournalStorage(JournalFileBackend(str(path)))
                self.study = optuna.create_study(
                    study_name=_STUDY,
                    storage=storage,
                    direction="maximize" if plan.maximize else "minimize",
                    pruner=SuccessiveHalvingPruner(min_resource=1, reduction_factor=REDUCTION),
                    load_if_exists=True,
                )
            except (ValueError, KeyError, TypeError) as error:  # not what Optuna wrote
                raise CheckpointError(
                    f"journal '{path}' cannot be read ({type(error).__name__}); give another --output, or restore it"
                ) from None
            self._check_plan(path)

    def _check_plan(self, path: Path) -> None:
        attributes, plan = self.study.user_attrs, self.plan
        if "digest" not in attributes:
            self.study.set_user_attr("trial", plan.trial.to_toml())
            self.study.set_user_attr("search", [one.text for one in plan.space])
            self.study.set_user_attr("digest", plan.digest)  # last: it says that the others are there
            self.study.enqueue_trial(own_values(plan.trial, plan.space))
            return
        if attributes["digest"] == plan.digest:
            return
        changed = differences(config_from_toml(attributes["trial"], f"journal '{path}'"), plan.trial)
        ours = [one.text for one in plan.space]
        if changed:
            name, (theirs, given) = next(iter(changed.items()))
            what = f"another recipe: its {name} is {theirs!r}, given {given!r}"
        elif attributes["search"] != ours:
            odd = next(iter(set(attributes["search"]) ^ set(ours)))
            what = f"other ranges: they differ in {odd}"
        else:
            what = "another --epochs, --rungs or --metric"
        raise CheckpointError(
            f"journal '{path}' is that of {what}; go on with what it was made with, or give another --output"
        )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else begins or takes over a trial meanwhile."""
        with lock(self.folder / ".lock", _LOCK_SECONDS) as held:
            if not held:
                raise MegabatchError(
                    f"'{self.folder}' has been locked for {_LOCK_SECONDS:g} s; is another host stuck there?"
                )
            yield

    def trials(self) -> list[FrozenTrial]:
        """All that have begun, by number."""
        return [one for one in self.study.get_trials(deepcopy=False) if one.state != TrialState.WAITING]

    def next_trial(self, wanted: bool, startup: int) -> HeldTrial | None:
        """A trial that was interrupted, else a new one if that is wanted; None when there is neither."""
        with self._alone():
            for one in self.trials():
                if one.state != TrialState.RUNNING or (held := self._hold(one.number)) is None:
                    continue
                # Optuna has no public way to a trial of an earlier process.
                found = self._ready(Trial(self.study, one._trial_id), held)
                if not found.rung or self._goes_on(found):
                    return found
            if not wanted:
                return None
            self.study.sampler = self._sampler(startup)
            trial = self.study.ask()
            held = self._hold(trial.number)
            assert held is not None, "a new trial is nobody else's"
            return self._ready(trial, held)

    def _sampler(self, startup: int) -> BaseSampler:
        number = len(self.trials())
        if number < startup:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)
                return QMCSampler(qmc_type="sobol", scramble=True, seed=self._seed, warn_independent_sampling=False)
        return TPESampler(seed=self._seed + number, multivariate=True, n_startup_trials=1)

    def _hold(self, number: int) -> ExitStack | None:
        folder = trial_folder(self.folder, number)
        folder.mkdir(parents=True, exist_ok=True)
        stack = ExitStack()
        if stack.enter_context(lock(folder / ".held", 0.0)):
            return stack
        stack.close()
        return None

    def _ready(self, trial: Trial, held: ExitStack) -> HeldTrial:
        values = {one.key: _suggest(trial, one) for one in self.plan.space}
        done = self.study.get_trials(deepcopy=False)[trial.number].intermediate_values
        return HeldTrial(trial, values, len(done), held)

    def report(self, held: HeldTrial, value: float, images: int, seconds: float) -> bool:
        """Note the number of the rung that has just ended and what it cost; True when the trial goes on to the next."""
        held.trial.set_user_attr(f"cost-{held.rung}", [images, seconds])
        held.trial.report(value, self.plan.rungs[held.rung].resource)
        held.rung += 1
        return self._goes_on(held)

    def _goes_on(self, held: HeldTrial) -> bool:
        """After a rung: end the trial if that was the last, or if too many others were better."""
        values = self.study.get_trials(deepcopy=False)[held.number].intermediate_values
        is_last = held.rung == len(self.plan.rungs)
        if is_last or held.trial.should_prune():
            self._end(held, values[max(values)] if is_last else None)
            return False
        return True

    def diverged(self, held: HeldTrial, images: int, seconds: float) -> None:
        """The trial's gradients are not finite: that is its result, and the sampler keeps away from there."""
        held.trial.set_user_attr(f"cost-{held.rung}", [images, seconds])
        held.trial.set_user_attr("diverged_at_rung", held.rung)
        self._end(held, None)

    def _end(self, held: HeldTrial, value: float | None) -> None:
        self.study.tell(held.trial, value, state=TrialState.PRUNED if value is None else TrialState.COMPLETE)
        held.close()


def trial_folder(folder: Path, number: int) -> Path:
    return folder / "trials" / f"{number:04d}"


def distributions(plan: TunePlan) -> dict[str, BaseDistribution]:
    """The ranges as Optuna's."""
    return {
        one.key: IntDistribution(int(one.low), int(one.high), log=one.log)
        if one.whole
        else FloatDistribution(one.low, one.high, log=one.log)
        for one in plan.space
    }


def _suggest(trial: Trial, one: Dimension) -> float:
    if one.whole:
        return trial.suggest_int(one.key, int(one.low), int(one.high), log=one.log)
    return trial.suggest_float(one.key, one.low, one.high, log=one.log)
