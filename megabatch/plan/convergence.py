"""Epochs to a target accuracy by total batch: the critical-batch law, fitted to points, with its uncertainty.

    E(B) = E0 (1 + B / Bc)

A batch of Bc needs twice the pictures of a small one (McCandlish 2018, arXiv 1812.06162, section 2; same form). The
shipped points are the reference convergence points of MLPerf Training 4.0 for ResNet-50, 75.9 % top-1
(github.com/mlcommons/logging, `mlperf_logging/rcp_checker/training_4.0.0/rcps_resnet.json`): ten settings of
several submitters, so the scatter around the law is the scatter of recipes. A user's own study replaces them.

While the batch changes, progress adds up: an epoch at batch B is 1 / E(B) of the way.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megabatch.errors import DataError
from megabatch.schedule.batch import BatchStages

__all__ = ["ConvergenceLaw", "Epochs", "fit_law", "mlperf_law", "read_study"]

MLPERF_TARGET = 0.759
_POINTS = Path(__file__).parent / "data" / "convergence.csv"
_EPOCH_KEYS = ("epochs_to_target", "epochs_mean", "epochs", "epoch")
_BATCH_KEYS = ("batch_total", "batch_total_last", "train.batch_total", "gbs")
_TOP1_KEYS = ("top1", "percent", "val_top1", "best_top1")


@dataclass(frozen=True, slots=True)
class Epochs:
    """Epochs to the target: the middle, the relative standard deviation of a recipe's value, and what to warn of."""

    epochs: float
    deviation: float
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class ConvergenceLaw:
    """E(B) = floor (1 + B / critical) with the covariance of (floor, floor / critical) and the scatter around it."""

    floor_epochs: float
    critical_batch: float
    covariance: tuple[tuple[float, float], tuple[float, float]]
    scatter: float
    batches: tuple[float, float]
    target: float
    source: str
    num_points: int

    def at(self, batch_total: float) -> Epochs:
        """Epochs at one total batch; the deviation holds the fit, the scatter of recipes, and extrapolation."""
        slope = self.floor_epochs / self.critical_batch if math.isfinite(self.critical_batch) else 0.0
        epochs = self.floor_epochs + slope * batch_total
        row = np.array([1.0, batch_total])
        fit = math.sqrt(max(0.0, float(row @ np.array(self.covariance) @ row))) / epochs
        outside = max(0.0, math.log2(batch_total / self.batches[1]), math.log2(self.batches[0] / batch_total) / 4)
        warnings = []
        if batch_total > self.batches[1]:
            warnings.append(
                f"total batch {batch_total:,.0f} is beyond the largest with known convergence "
                f"({self.batches[1]:,.0f}): whether the target is reached at all is not known"
            )
        return Epochs(epochs, math.hypot(fit, self.scatter, 0.10 * outside), tuple(warnings))

    def for_stages(self, stages: BatchStages) -> Epochs:
        """Epochs of a run whose batch changes: each stage contributes its epochs / E(batch) to a whole of 1."""
        done, end = 0.0, math.inf
        deviations, warnings = [], []
        for index, (start, batch_total) in enumerate(zip(stages.from_epochs, stages.batch_totals, strict=True)):
            here = self.at(batch_total)
            next_start = stages.from_epochs[index + 1] if index + 1 < len(stages.from_epochs) else math.inf
            deviations.append(here.deviation)
            warnings += [text for text in here.warnings if text not in warnings]
            if done + (next_start - start) / here.epochs >= 1:
                end = start + (1 - done) * here.epochs
                break
            done += (next_start - start) / here.epochs
        return Epochs(end, max(deviations), tuple(warnings))


def mlperf_law() -> ConvergenceLaw:
    """The law of the shipped points."""
    with open(_POINTS, encoding="utf-8", newline="") as file:
        points = [(float(row["batch_total"]), float(row["epochs_mean"])) for row in csv.DictReader(file)]
    return fit_law(points, MLPERF_TARGET, "MLPerf Training 4.0 reference convergence points")


def fit_law(points: Sequence[tuple[float, float]], target: float, source: str) -> ConvergenceLaw:
    """Least squares of ln E, each point alike, by Gauss-Newton steps from the plain line.

    Raises:
        DataError: fewer than three points or two batches, or epochs that do not rise with the batch at all.
    """
    batches = np.array([batch for batch, _ in points])
    epochs = np.array([value for _, value in points])
    if len(points) < 3 or len(set(batches)) < 2:
        raise DataError(
            f"{source} has {len(points)} points at {len(set(batches.tolist()))} total batches; epochs by batch need at "
            "least 3 points at 2 batches: add runs, or leave it out to use the MLPerf points"
        )
    if not (np.all(np.isfinite(epochs)) and np.all(epochs > 0) and np.all(batches > 0)):
        raise DataError(f"{source} has epochs or batches that are not above 0; remove those rows")
    design = np.stack([np.ones_like(batches), batches], axis=1)
    parameters = np.linalg.lstsq(design, epochs, rcond=None)[0]
    for _ in range(20):
        fitted = np.maximum(design @ parameters, 1e-6)
        jacobian = design / fitted[:, None]
        parameters = parameters + np.linalg.lstsq(jacobian, np.log(epochs) - np.log(fitted), rcond=None)[0]
    floor, slope = float(parameters[0]), float(max(0.0, parameters[1]))
    if floor <= 0:
        raise DataError(
            f"{source} contradicts the law E0 (1 + B / Bc): E0 comes out as {floor:.3g}; look for wrong rows"
        )
    residuals = np.log(epochs) - np.log(design @ np.array([floor, slope]))
    scatter = math.sqrt(float(residuals @ residuals) / (len(points) - 2))
    jacobian = design / (design @ np.array([floor, slope]))[:, None]
    covariance = scatter**2 * np.linalg.inv(jacobian.T @ jacobian)
    (a, b), (c, d) = covariance.tolist()
    critical = floor / slope if slope > 0 else math.inf
    limits = (float(batches.min()), float(batches.max()))
    return ConvergenceLaw(floor, critical, ((a, b), (c, d)), scatter, limits, target, source, len(points))


def read_study(path: str | Path, target: float | None) -> ConvergenceLaw:
    """The law of a study's CSV, such as the `runs.csv` of `megabatch study`: the first column found of each kind.

    batch: batch_total, batch_total_last, train.batch_total or gbs. epochs: epochs_to_target, epochs_mean, epochs or
    epoch. accuracy, optional: top1, percent, val_top1 or best_top1.

    Rows whose accuracy (a fraction, or per cent when above 1) is below the target did not arrive and are left out.
    Without a target the epochs count as they stand.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"study '{path}' cannot be read ({error}); give the CSV of `megabatch study`") from None
    columns = list(rows[0]) if rows else []
    batch_key, epoch_key, top1_key = (_first(columns, keys) for keys in (_BATCH_KEYS, _EPOCH_KEYS, _TOP1_KEYS))
    if not batch_key or not epoch_key:
        raise DataError(
            f"study '{path}' has columns {', '.join(columns) or 'none'}; it needs batch_total and epochs "
            "(and top1 when there is a target)"
        )
    points = []
    for number, row in enumerate(rows, start=2):
        try:
            batch_total, epochs = float(row[batch_key]), float(row[epoch_key])
            top1 = float(row[top1_key]) if top1_key and row[top1_key] else None
        except (TypeError, ValueError):
            raise DataError(f"study '{path}', line {number}: {dict(row)} is not numbers; mend that line") from None
        reached = top1 is None or target is None or (top1 / 100 if top1 > 1 else top1) >= target
        if reached or epoch_key == "epochs_to_target":
            points.append((batch_total, epochs))
    return fit_law(points, target or 0.0, f"study '{Path(path).name}'")


def _first(columns: Iterable[str], wanted: Sequence[str]) -> str:
    names = list(columns)
    return next((name for name in wanted if name in names), "")
