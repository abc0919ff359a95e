"""The step time of a family of systems as a function of its parameters: what a fit to rows (`calibrate`) returns.

    step = fixed + per_image * b + across * [more than one node] + (scatter * b + jitter) * m(N)

`fixed` is what neither batch nor workers change (launches, optimizer), `across` what the first step beyond a node
costs (the part of the all-reduce that the backward pass does not hide). Every step waits for the slowest worker,
whose delay goes with m(N), the expected maximum: `scatter` of it is a part of what is computed (clocks, temperature,
images), `jitter` is not (operating system, deeper collectives). Logs that time blocks with an evaluation at the end
contain `evaluation` seconds more, spread over the steps of four epochs. None of the parameters can be negative.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from megabatch.errors import DataError
from megabatch.plan.interval import (
    FORM,
    MAX_DEVIATION,
    Interval,
    Reach,
    combine,
    interval,
    reach_deviation,
    reach_warnings,
)
from megabatch.plan.rows import Row
from megabatch.plan.straggler import expected_maximum

__all__ = ["PARAMETERS", "StepFit", "fit_as_data", "row_features"]

PARAMETERS = ("fixed", "per_image", "across", "scatter", "jitter", "evaluation")

_IMAGES_BETWEEN_EVALUATIONS = 4 * 1_281_167

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class StepFit:
    """Fitted parameters with covariance, and where they come from.

    parameters: in the order of `PARAMETERS`, seconds; `scatter` per image, it and `jitter` per unit of m.
    lack_of_fit: relative deviation of the rows from their line, at least `FORM`.
    """

    parameters: tuple[float, ...]
    covariance: Array
    rows: tuple[Row, ...]
    evidence: str
    undetermined: tuple[str, ...]
    lack_of_fit: float = FORM

    @property
    def deviations(self) -> tuple[float, ...]:
        """One standard deviation of each parameter."""
        return tuple(math.sqrt(max(0.0, float(value))) for value in np.diag(self.covariance))

    @property
    def logs_contain_evaluation(self) -> bool:
        """Whether any of the rows does."""
        return any(row.contains_evaluation for row in self.rows)

    def seconds(self, local_batch: float, world_size: int, num_nodes: int, *, logged: bool = False) -> float:
        """The middle of the prediction; `logged` adds the evaluation that such a log would contain."""
        return float(_features(local_batch, world_size, num_nodes, logged) @ np.array(self.parameters))

    def pass_seconds(self, ghost_batch_size: float) -> float:
        """What one worker computes for one ghost batch."""
        fixed, per_image, *_ = self.parameters
        return fixed + per_image * ghost_batch_size

    def parts(
        self, ghost_batch_size: float, world_size: int, num_nodes: int, passes: int, work: float = 1.0
    ) -> dict[str, float]:
        """Seconds of a step of `passes` ghost batches in turn, by part; without evaluation.

        work: multiply-adds of the network over those of the rows' network.
        """
        *_, across, scatter, jitter, _ = self.parameters
        slowest = (work * scatter * passes * ghost_batch_size + jitter) * expected_maximum(world_size)
        exposed = across if num_nodes > 1 else 0.0
        return {
            "compute": work * passes * self.pass_seconds(ghost_batch_size),
            "exposed communication": exposed,
            "stragglers": slowest,
        }

    def changed(self, part: str, factor: float) -> StepFit:
        """The fit with "compute", "stragglers" or what is "exposed" `factor` times as long."""
        touched = {
            "compute": ("fixed", "per_image"),
            "stragglers": ("scatter", "jitter"),
            "exposed": ("across",),
        }[part]
        values = zip(PARAMETERS, self.parameters, strict=True)
        parameters = tuple(value * (factor if name in touched else 1.0) for name, value in values)
        return dataclasses.replace(self, parameters=parameters)

    def reach(self, local_batch: float, world_size: int, num_nodes: int) -> Reach:
        """How far from the calibrated rows."""
        batches = [row.local_batch for row in self.rows]
        most_workers = max(row.world_size for row in self.rows)
        return Reach(
            workers=max(0.0, math.log2(world_size / most_workers)),
            batch=max(0.0, math.log2(min(batches) / local_batch), math.log2(local_batch / max(batches))),
            evidence=self.evidence,
            first_time_across_nodes=num_nodes > 1 and all(row.num_nodes == 1 for row in self.rows),
            mixed_measurement=self.logs_contain_evaluation,
            lack_of_fit=self.lack_of_fit,
            known_workers=f"of the largest calibrated row ({most_workers:,})",
        )

    def deviation(
        self, local_batch: float, world_size: int, num_nodes: int, passes: int = 1, *, logged: bool = False
    ) -> float:
        """Relative standard deviation of a step of `passes` times `local_batch` images: parameters and form."""
        # Each pass has the fixed part and the images; the slowest worker's images add up, the rest comes once.
        times = np.array([passes, passes, 1, passes, 1, passes])
        features = _features(local_batch, world_size, num_nodes, logged) * times
        spread = math.sqrt(max(0.0, float(features @ self.covariance @ features)))
        middle = float(features @ np.array(self.parameters))
        return combine(spread / middle, reach_deviation(self.reach(local_batch, world_size, num_nodes)))

    def predict(self, local_batch: float, world_size: int, num_nodes: int, *, logged: bool = False) -> Interval:
        """Step seconds with the 80 % interval; `logged`: with the evaluation that such a log would contain.

        Raises:
            DataError: the rows say so little that an answer would mean nothing.
        """
        middle = self.seconds(local_batch, world_size, num_nodes, logged=logged)
        deviation = self.deviation(local_batch, world_size, num_nodes, logged=logged)
        if not math.isfinite(middle) or middle <= 0 or deviation > MAX_DEVIATION:
            raise DataError(
                f"the {len(self.rows)} calibration rows cannot tell the step at local batch {local_batch:g} on "
                f"{world_size:,} workers (deviation {deviation:.0%}); add rows nearer to it"
            )
        return interval(middle, deviation)

    def warnings(self, local_batch: float, world_size: int, num_nodes: int) -> list[str]:
        """What widens the interval, for people."""
        found = reach_warnings(self.reach(local_batch, world_size, num_nodes))
        if self.undetermined:
            found.append(f"the rows do not determine {', '.join(self.undetermined)}: taken from the prior")
        return found


def fit_as_data(fit: StepFit) -> dict[str, Any]:
    """A fit for a program to read: seconds, one standard deviation each."""
    values = zip(PARAMETERS, fit.parameters, fit.deviations, strict=True)
    return {
        "parameters": {name: {"value": value, "deviation": deviation} for name, value, deviation in values},
        "undetermined": list(fit.undetermined),
        "num_rows": len(fit.rows),
        "evidence": fit.evidence,
        "lack_of_fit": fit.lack_of_fit,
    }


def row_features(row: Row) -> Array:
    """What each parameter is multiplied with in a row's step."""
    return _features(row.local_batch, row.world_size, row.num_nodes, row.contains_evaluation)


def _features(local_batch: float, world_size: int, num_nodes: int, logs_contain_evaluation: bool) -> Array:
    evaluations = local_batch * world_size / _IMAGES_BETWEEN_EVALUATIONS if logs_contain_evaluation else 0.0
    slowest = expected_maximum(world_size)
    return np.array([1.0, local_batch, float(num_nodes > 1), local_batch * slowest, slowest, evaluations])
