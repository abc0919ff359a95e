"""What a search came to: one row per trial, the best one, how wide the good range is, what it cost."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import optuna
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.trial import FrozenTrial, TrialState

from megabatch.text import count_text, markdown_table, seconds_text
from megabatch.tune.journal import distributions
from megabatch.tune.plan import TunePlan
from megabatch.tune.space import LEVEL, Dimension

Outcome = Literal["finished", "pruned", "diverged", "under way"]
MARGIN = {"top1": 0.01, "top5": 0.01, "val_loss": 0.05}  # how far from the best still counts as good
_NEAR_END = 0.05  # of the range
_FEW = 4  # trials say nothing about importance


@dataclass(frozen=True)
class TrialResult:
    """One trial; `numbers` holds the metric of each length of run that it finished."""

    number: int
    values: dict[str, float]
    outcome: Outcome
    numbers: tuple[float, ...]
    images: int
    seconds: float


def read_trials(trials: Sequence[FrozenTrial]) -> list[TrialResult]:
    """The trials of a journal."""
    found = []
    for one in trials:
        outcome: Outcome = "under way"
        if one.state.is_finished():
            outcome = "finished" if one.state == TrialState.COMPLETE else "pruned"
        if "diverged_at_rung" in one.user_attrs:
            outcome = "diverged"
        costs = [value for name, value in one.user_attrs.items() if name.startswith("cost-")]
        numbers = tuple(one.intermediate_values[step] for step in sorted(one.intermediate_values))
        found.append(
            TrialResult(
                number=one.number,
                values=dict(one.params),
                outcome=outcome,
                numbers=numbers,
                images=sum(int(images) for images, _ in costs),
                seconds=math.fsum(seconds for _, seconds in costs),
            )
        )
    return found


@dataclass(frozen=True)
class GoodRange:
    """Where trials were about as good as the best, judged by the length that all of them were run at."""

    key: str
    low: float
    high: float
    num_trials: int
    log: bool

    @property
    def text(self) -> str:
        wide = f", a factor of {self.high / self.low:.2g}" if self.log and self.low > 0 else ""
        return f"{self.key} {self.low:.3g} to {self.high:.3g}{wide}"


@dataclass(frozen=True)
class SearchResult:
    """What the trials of a plan came to."""

    plan: TunePlan
    trials: Sequence[TrialResult]

    @property
    def best(self) -> TrialResult | None:
        """The best of those whose runs were longest; None when no run has ended with a number."""
        scored = [one for one in self.trials if one.numbers and one.outcome != "diverged"]
        return max(scored, key=lambda one: (len(one.numbers), self._sign * one.numbers[-1], -one.number), default=None)

    @property
    def good_ranges(self) -> list[GoodRange]:
        """Per setting, the smallest and largest value of trials near the best, at the shortest length."""
        plan, first = self.plan, {one.number: one.numbers[0] for one in self.trials if one.numbers}
        if not first:
            return []
        best = max(first.values()) if plan.maximize else min(first.values())
        good = [
            one for one in self.trials if one.number in first and abs(first[one.number] - best) <= MARGIN[plan.metric]
        ]
        ranges = []
        for dimension in plan.space:
            values = [one.values[dimension.key] for one in good]
            ranges.append(GoodRange(dimension.key, min(values), max(values), len(good), dimension.log))
        return ranges

    @cached_property
    def importance(self) -> dict[str, float]:
        """How much of the metric each setting decides, at the shortest length; empty when there are too few trials.

        PED-ANOVA (Watanabe 2023) by Optuna: shares that add up to one. A diverged trial counts as the worst of all.
        """
        scored = [(one, one.numbers[0]) for one in self.trials if one.numbers]
        if len(scored) < _FEW or len({number for _, number in scored}) < 2:
            return {}
        maximize, ranges = self.plan.maximize, distributions(self.plan)
        worst = min(number for _, number in scored) if maximize else max(number for _, number in scored)
        scored += [(one, worst) for one in self.trials if not one.numbers and one.outcome == "diverged"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna calls the evaluator experimental
            optuna.logging.set_verbosity(optuna.logging.ERROR)
            study = optuna.create_study(direction="maximize" if maximize else "minimize")
            for one, number in scored:
                study.add_trial(optuna.trial.create_trial(params=one.values, distributions=ranges, value=number))
            found = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
        return {key: float(share) for key, share in found.items() if math.isfinite(share)}

    @property
    def images(self) -> int:
        return sum(one.images for one in self.trials)

    @property
    def seconds(self) -> float:
        return math.fsum(one.seconds for one in self.trials)

    @property
    def images_of_all(self) -> int:
        """What the same trials would have cost without pruning, in images: each run once, at full length."""
        return len(self.trials) * self.plan.images(self.plan.rungs[-1])

    @property
    def statements(self) -> list[str]:
        """What the search says, in sentences."""
        plan, results = self.plan, self.trials
        counts = {kind: sum(one.outcome == kind for one in results) for kind in ("finished", "pruned", "diverged")}
        said = [
            f"{len(results)} trials: "
            + ", ".join(f"{count} {kind}" for kind, count in counts.items())
            + f"; {self.images:,} images, {seconds_text(self.seconds)} of training."
        ]
        if len(plan.rungs) > 1:
            whole = self.images_of_all
            said.append(
                f"All trials at full length would have taken {whole:,} images: {self.images / max(1, whole):.0%} "
                "were used."
            )
        best = self.best
        if best is None:
            return said
        length = plan.rungs[len(best.numbers) - 1]
        shown = f"{100 * best.numbers[-1]:.2f} %" if plan.metric != "val_loss" else f"{best.numbers[-1]:.4f}"
        held_out = plan.trial.data.held_out_images
        said.append(
            f"Best: trial {best.number}, {plan.metric} {shown} of {held_out:,} held-out images, "
            f"{length.epochs:g} epochs."
        )
        own = next((one for one in results if one.number == 0 and len(one.numbers) == len(best.numbers)), None)
        if own is not None and own is not best and plan.metric != "val_loss":
            said.append(f"The recipe as it was (trial 0): {100 * own.numbers[-1]:.2f} %.")
        margin = MARGIN[plan.metric]
        margin_text = f"{100 * margin:g} point" if plan.metric != "val_loss" else f"{margin:g}"
        ranges = self.good_ranges
        listed = "; ".join(one.text for one in ranges)
        said.append(
            f"Within {margin_text} of the best at the shortest length, {ranges[0].num_trials} trials: {listed}."
        )
        said += [text for one in plan.space if (text := _at_an_end(one, best.values[one.key]))]
        return said

    @property
    def all_diverged(self) -> str:
        """One line when every trial that has ended diverged; empty otherwise."""
        ended = [one for one in self.trials if one.outcome != "under way"]
        if not ended or any(one.outcome != "diverged" for one in ended):
            return ""
        level = next((one for one in self.plan.space if one.key == LEVEL), self.plan.space[0])
        tried = [one.values[level.key] for one in ended]
        lower = f"{level.low / 100 if level.log else level.low / 2:.3g}:{level.low:.3g}{':log' if level.log else ''}"
        return (
            f"all {len(ended)} trials diverged, with {level.key} from {min(tried):.3g} to {max(tried):.3g}; extend the "
            f"lower end: --search {level.key}={lower} with another --output, or lower optimizer.lr"
        )

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row per trial, for CSV and JSON; None where there is no number."""
        plan, table = self.plan, []
        for one in self.trials:
            numbers = {
                f"{plan.metric}_at_{rung.epochs:g}_epochs": one.numbers[rung.number]
                if rung.number < len(one.numbers)
                else None
                for rung in plan.rungs
            }
            cost = {"images": one.images, "seconds": round(one.seconds, 3)}
            table.append({"trial": one.number, "outcome": one.outcome, **one.values, **numbers, **cost})
        return table

    @property
    def table(self) -> str:
        """The trials for people, the best first."""
        plan = self.plan
        order = sorted(
            self.trials,
            key=lambda one: (-len(one.numbers), -self._sign * one.numbers[-1] if one.numbers else 0.0, one.number),
        )
        head = ["trial", *(one.key.rpartition(".")[2] for one in plan.space)]
        head += [f"{plan.metric}, {rung.epochs:.3g} epochs" for rung in plan.rungs]
        head += ["outcome", "images"]
        rows = []
        for one in order:
            cells = [str(one.number), *(f"{one.values.get(d.key, math.nan):.3g}" for d in plan.space)]
            cells += [_number(plan, one, rung.number) for rung in plan.rungs]
            rows.append([*cells, one.outcome, count_text(one.images)])
        return markdown_table(head, rows)

    @property
    def _sign(self) -> int:
        return 1 if self.plan.maximize else -1


def _position(one: Dimension, value: float) -> float:
    """Where in its range a value lies, 0 to 1."""
    if one.log:
        return math.log(value / one.low) / math.log(one.high / one.low)
    return (value - one.low) / (one.high - one.low)


def _at_an_end(one: Dimension, value: float) -> str:
    place = _position(one, value)
    if one.key != LEVEL or _NEAR_END < place < 1 - _NEAR_END:
        return ""
    end = "lower" if place <= _NEAR_END else "upper"
    return f"The best {one.key} {value:.3g} lies at the {end} end of {one.low:.3g} to {one.high:.3g}: extend that end."


def _number(plan: TunePlan, one: TrialResult, rung: int) -> str:
    if rung >= len(one.numbers):
        return ""
    return f"{one.numbers[rung]:.4f}" if plan.metric == "val_loss" else f"{100 * one.numbers[rung]:.2f}"
