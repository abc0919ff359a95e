"""Epochs to a target accuracy by global batch: the critical-batch law, fitted to points, with its uncertainty.

    E(B) = E0 (1 + B / Bc)

A batch of Bc needs twice the images of a small one (McCandlish 2018, arXiv 1812.06162, section 2; same form). The
shipped points are the reference convergence points of MLPerf Training 4.0 for ResNet-50, 75.9 % top-1
(github.com/mlcommons/logging, `mlperf_logging/rcp_checker/training_4.0.0/rcps_resnet.json`): ten settings of
several submitters, so the scatter around the law is the scatter of recipes. A user's own study replaces them.

Epochs that fall while the batch grows contradict the law: the small batch was not tuned, or was not trained to the
same target. A fall beyond the scatter of runs is refused; a smaller one is chance, and the law is then a constant.

While the batch changes, progress adds up: an epoch at batch B is 1 / E(B) of the way.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megabatch.errors import ConfigError, DataError
from megabatch.plan.quantity import EPOCHS, GLOBAL_BATCH_SIZE, Bounds, cell_number
from megabatch.plan.rows import read_table
from megabatch.plan.workload import IMAGENET_TRAIN, Workload
from megabatch.schedule.batch import BatchStages

MLPERF_TARGET = 0.759
_LEAST_SCATTER = 0.05
"""Relative scatter of runs, where repeats at one batch do not show more: that of MLPerf's points around their law."""
_USUAL_POINTS = 3
_MOST_SCATTER = 0.5
STUDY_TABLE = "targets.csv"
"""What `megabatch study` writes about the way to its target."""
_LEAST_RANGE = 1.1
"""How much larger the largest global batch must be than the smallest."""
_POINTS = Path(__file__).parent / "data" / "convergence.csv"
_EPOCH_KEYS = ("epochs_to_target", "epochs_mean", "epochs", "epoch")
_BATCH_KEYS = ("global_batch_size", "global_batch_size_last", "train.global_batch_size", "gbs")
_TOP1_KEYS = ("top1", "percent", "val_top1", "best_top1")
_TOP1 = Bounds(0.0, 100.0)

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Epochs:
    """Epochs to the target: the middle, the relative standard deviation of a recipe's value, and what to warn of."""

    epochs: float
    deviation: float
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class ConvergenceLaw:
    """E(B) = floor (1 + B / critical) with the covariance of (floor, floor / critical) and the scatter around it.

    critical_batch: infinite where epochs do not depend on the batch. batches: the smallest and the largest global batch
    of the points, which come from `source`.
    """

    floor_epochs: float
    critical_batch: float
    covariance: tuple[tuple[float, float], tuple[float, float]]
    scatter: float
    batches: tuple[float, float]
    source: str = ""

    @property
    def evidence(self) -> str:
        """On what the epochs rest: "MLPerf ... points at global batches of 1,632 to 67,840"."""
        least, most = self.batches
        return f"{self.source} at global batches of {least:,.0f} to {most:,.0f}"

    def at(self, global_batch_size: float) -> Epochs:
        """Epochs at one global batch; the deviation holds the fit, the scatter of recipes, and extrapolation."""
        slope = self.floor_epochs / self.critical_batch
        epochs = self.floor_epochs + slope * global_batch_size
        row = np.array([1.0, global_batch_size])
        fit = math.sqrt(max(0.0, float(row @ np.array(self.covariance) @ row))) / epochs
        least, most = self.batches
        outside = max(0.0, math.log2(global_batch_size / most), math.log2(least / global_batch_size) / 4)
        warning = (
            f"global batch {global_batch_size:,.0f} is beyond the largest with known convergence ({most:,.0f}): "
            "whether the target is reached at all is not known"
        )
        warnings = (warning,) if global_batch_size > most else ()
        return Epochs(epochs, math.hypot(fit, self.scatter, 0.10 * outside), warnings)

    def for_stages(self, stages: BatchStages) -> Epochs:
        """Epochs of a run whose batch changes: each stage contributes its epochs / E(batch) to a whole of 1."""
        done, passed = 0.0, []
        ends = (*stages.from_epochs[1:], math.inf)
        for start, end, batch in zip(stages.from_epochs, ends, stages.global_batch_sizes, strict=True):
            passed.append(here := self.at(batch))
            if done + (end - start) / here.epochs >= 1:
                break
            done += (end - start) / here.epochs
        warnings = dict.fromkeys(text for one in passed for text in one.warnings)
        return Epochs(start + (1 - done) * here.epochs, max(one.deviation for one in passed), tuple(warnings))

    def whole(self, stages: BatchStages, epochs: float) -> float:
        """Epochs to the target when stages made for a run of `epochs` are stretched to just that length."""
        parts = [start / epochs for start in stages.from_epochs]
        lengths = [end - start for start, end in zip(parts, [*parts[1:], 1.0], strict=True)]
        known = zip(lengths, stages.global_batch_sizes, strict=True)
        return 1 / sum(length / self.at(batch).epochs for length, batch in known if length > 0)


def choose_law(target: float | None, study: Path | None, workload: Workload) -> ConvergenceLaw | None:
    """The law of the user's study, or that of the stored points; None where neither was asked for.

    Raises:
        ConfigError: no such accuracy, or one about which the stored points say nothing.
    """
    top1 = target / 100 if target is not None and target > 1 else target
    if top1 is not None and not 0 < top1 < 1:
        raise ConfigError(f"target {target:g} is no accuracy; give top-1 in per cent, such as 75.9")
    if study is not None:
        return read_study(study, top1)
    if top1 is None:
        return None
    if abs(top1 - MLPERF_TARGET) > 0.0015:
        raise ConfigError(
            f"target {100 * top1:g} % is not the {100 * MLPERF_TARGET:g} % of the stored convergence points, which "
            "say nothing about it; give your own runs with --study, or leave --target out to count the recipe's epochs"
        )
    if (workload.model, workload.num_train) != ("resnet50", IMAGENET_TRAIN):
        raise ConfigError(
            f"the stored convergence points are of resnet50 on ImageNet's {IMAGENET_TRAIN:,} images, the recipe "
            f"trains {workload.model} on {workload.num_train:,}; give your own runs with --study, or leave --target out"
        )
    return mlperf_law()


def mlperf_law() -> ConvergenceLaw:
    """The law of the shipped points."""
    with open(_POINTS, encoding="utf-8", newline="") as file:
        points = [(float(row["global_batch_size"]), float(row["epochs_mean"])) for row in csv.DictReader(file)]
    return fit_law(points, "MLPerf Training 4.0 reference convergence points")


def fit_law(points: Sequence[tuple[float, float]], source: str) -> ConvergenceLaw:
    """Least squares of ln E, each point alike; a constant where the best line falls by no more than chance.

    Raises:
        DataError: fewer than three points or two batches, a value that cannot be, epochs that fall with the batch or
            do otherwise than the law can.
    """
    for batch, epochs in points:
        if GLOBAL_BATCH_SIZE.why_not(batch) or EPOCHS.why_not(epochs):
            raise DataError(f"{source} has a point of global batch {batch:g} and {epochs:g} epochs; remove it")
    batches = np.array([batch for batch, _ in points])
    logs = np.log([epochs for _, epochs in points])
    if len(points) < 3 or batches.max() < _LEAST_RANGE * batches.min():
        raise DataError(
            f"{source} has {len(points)} points at {len(set(batches.tolist()))} global batches; epochs by batch need "
            f"at least 3 points at 2 batches that differ by {_LEAST_RANGE - 1:.0%}: add runs, or leave it out to use "
            "the MLPerf points"
        )
    _refuse_fall(batches, logs, source)
    design = np.stack([np.ones_like(batches), batches], axis=1)
    floor, slope = map(float, _gauss_newton(design, logs))
    if slope <= 0:
        floor, slope, design = math.exp(logs.mean()), 0.0, design[:, :1]
    if not floor > 0:
        raise DataError(
            f"{source} contradicts the law E0 (1 + B / Bc): E0 comes out as {floor:.3g}; look for wrong rows"
        )
    fitted = floor + slope * batches
    residuals = logs - np.log(fitted)
    # A few points may lie on their line by luck: the usual scatter counts as three more of them.
    freedom = len(points) - design.shape[1]
    squares = float(residuals @ residuals) + _USUAL_POINTS * _LEAST_SCATTER**2
    scatter = math.sqrt(squares / (freedom + _USUAL_POINTS))
    if scatter > _MOST_SCATTER:
        raise DataError(
            f"{source} contradicts the law E0 (1 + B / Bc): epochs lie {scatter:.0%} off it; look for wrong rows"
        )
    jacobian = design / fitted[:, None]
    covariance = np.zeros((2, 2))
    covariance[: design.shape[1], : design.shape[1]] = scatter**2 * np.linalg.inv(jacobian.T @ jacobian)
    (a, b), (c, d) = covariance.tolist()
    critical = floor / slope if slope > 0 else math.inf
    limits = (float(batches.min()), float(batches.max()))
    return ConvergenceLaw(floor, critical, ((a, b), (c, d)), scatter, limits, source)


def _gauss_newton(design: Array, logs: Array) -> Array:
    """(floor, slope) of the line whose logarithm is nearest to `logs`, from the plain line on."""
    parameters = np.asarray(np.linalg.lstsq(design, np.exp(logs), rcond=None)[0], dtype=np.float64)
    for _ in range(20):
        fitted = np.maximum(design @ parameters, 1e-6)
        change = np.linalg.lstsq(design / fitted[:, None], logs - np.log(fitted), rcond=None)[0]
        parameters = parameters + change
    return parameters


def _refuse_fall(batches: Array, logs: Array, source: str) -> None:
    """Refuse epochs that are fewer at the largest batch than at the smallest by more than two deviations."""
    repeats = [logs[batches == batch] for batch in np.unique(batches)]
    freedom = len(logs) - len(repeats)
    within = sum(float(((group - group.mean()) ** 2).sum()) for group in repeats)
    scatter = max(_LEAST_SCATTER, math.sqrt(within / freedom) if freedom else 0.0)
    first, last = repeats[0], repeats[-1]
    if first.mean() - last.mean() > 2 * scatter * math.sqrt(1 / len(first) + 1 / len(last)):
        raise DataError(
            f"in {source} epochs fall from {math.exp(first.mean()):.3g} at global batch {batches.min():,.0f} to "
            f"{math.exp(last.mean()):.3g} at {batches.max():,.0f}; give runs of one recipe to one target, tuned at "
            "each batch"
        )


def median_with_censored(values: Sequence[float | None]) -> float:
    """The median of at least one value, where None is later than all others; infinite when it is one of those."""
    ordered = sorted(math.inf if value is None else value for value in values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def read_study(path: str | Path, target: float | None) -> ConvergenceLaw:
    """The law of a study's CSV, such as the `runs.csv` of `megabatch study`: the first column found of each kind.

    batch: global_batch_size, global_batch_size_last, train.global_batch_size or gbs. epochs: epochs_to_target,
    epochs_mean, epochs or epoch. accuracy, optional: top1, percent, val_top1 or best_top1.

    Rows whose accuracy (a fraction, or per cent when above 1) is below the target did not arrive and are left out.
    Without a target the epochs count as they stand. Where there are `epochs_to_target`, rows without did not arrive: a
    batch counts with the median of its runs, and not at all when half of them or more did not arrive.

    Raises:
        DataError: no such table, a value that cannot be, or points that determine no law (see `fit_law`).
    """
    columns, rows = read_table(path, f"study '{path}'", "the CSV of `megabatch study`")
    batch_key, epoch_key, top1_key = (
        next((name for name in keys if name in columns), "") for keys in (_BATCH_KEYS, _EPOCH_KEYS, _TOP1_KEYS)
    )
    if not batch_key or not epoch_key:
        raise DataError(
            f"study '{path}' has columns {', '.join(columns) or 'none'}; it needs global_batch_size and epochs "
            "(and top1 when there is a target)"
        )
    if epoch_key == "epochs_to_target":
        return fit_law(_medians(path, columns, rows, batch_key, target), f"study '{Path(path).name}'")
    points = []
    for line, row in rows:
        where = f"study '{path}', line {line}: "
        batch = cell_number(row[batch_key], where + batch_key, GLOBAL_BATCH_SIZE)
        epochs = cell_number(row[epoch_key], where + epoch_key, EPOCHS)
        top1 = cell_number(row[top1_key], where + top1_key, _TOP1) if top1_key and row[top1_key] else None
        reached = top1 is None or target is None or (top1 / 100 if top1 > 1 else top1) >= target
        if reached:
            points.append((batch, epochs))
    return fit_law(points, f"study '{Path(path).name}'")


def _medians(
    path: str | Path,
    columns: Sequence[str],
    rows: Sequence[tuple[int, dict[str, str]]],
    batch_key: str,
    target: float | None,
) -> list[tuple[float, float]]:
    """The median epochs to the target of every batch that has one."""
    for column, what in (("group", "methods"), ("target_percent", "targets")):
        if column in columns and len(kinds := sorted({row[column] for _, row in rows})) > 1:
            raise DataError(
                f"study '{path}' holds {len(kinds)} {what} ({', '.join(kinds[:4])}), which have laws of their own; "
                f"give a table with the rows of one {column}"
            )
    by_batch: dict[float, list[float | None]] = {}
    for line, row in rows:
        where = f"study '{path}', line {line}: "
        if target is not None and "target_percent" in columns:
            own = cell_number(row["target_percent"], where + "target_percent", _TOP1)
            if abs(own - 100 * target) > 1e-6:
                raise DataError(
                    f"study '{path}' counts the epochs to {own:g} %, not to the target of {100 * target:g} %; leave "
                    "--target out, or collect the study with that target"
                )
        batch = cell_number(row[batch_key], where + batch_key, GLOBAL_BATCH_SIZE)
        epochs = (
            cell_number(row["epochs_to_target"], where + "epochs_to_target", EPOCHS)
            if row["epochs_to_target"]
            else None
        )
        by_batch.setdefault(batch, []).append(epochs)
    medians = ((batch, median_with_censored(values)) for batch, values in by_batch.items())
    return [(batch, median) for batch, median in medians if math.isfinite(median)]
