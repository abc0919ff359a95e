"""Predict rows that are known, by a stated rule, and say how far off the predictions were.

    larger   rows of more than 64 workers, from rows of at most 64 of the same family and software stack; where that
             stack has none, from the family's other stacks, then from other systems with the accelerator (told apart);
             an accelerator that has no row of at most 64 workers is calibrated on its smallest size
    others   every row of at most 64 workers, from all the others of at most 64 by the same order of evidence: never
             from itself
    pairs    two rows of one family, stack and local batch: the larger from the smaller alone (the network only)

`median_error` and `max_error` are of GPU rows under `larger` that their own stack calibrates (without any: of all
under `larger`, then of `others`; `headline` says which). `coverage` is the part of all predicted rows under
`larger`, whatever the evidence and kind, that the 80 % interval holds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megabatch.errors import DataError, MegabatchError
from megabatch.plan.fit import fit_steps
from megabatch.plan.rows import SystemRow, generation, read_rows

CALIBRATED_WORKERS = 64
_RULES = ("larger", "others", "pairs")
_OWN = ("same system", "same stack")
_HEADLINES = ("larger, GPU, own stack", "larger, all")


@dataclass(frozen=True, slots=True)
class RowResult:
    """One prediction against its measurement, milliseconds; `error` is signed, as a part of the measured value."""

    rule: str
    row: str
    kind: str
    evidence: str
    num_calibration_rows: int
    workers: int
    local_batch: float
    measured_ms: float
    predicted_ms: float
    low_ms: float
    high_ms: float
    error: float
    covered: bool
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Validation:
    """All results, and the rows about which nothing could be said, with the reason."""

    results: tuple[RowResult, ...]
    refused: tuple[str, ...]
    aside: tuple[str, ...]

    def as_data(self) -> dict[str, Any]:
        """What `--json` prints; errors and coverage are fractions."""
        larger, others, pairs = ([one for one in self.results if one.rule == rule] for rule in _RULES)
        groups = {
            "larger, GPU, own stack": [one for one in larger if one.kind == "gpu" and one.evidence in _OWN],
            "larger, GPU, other evidence": [one for one in larger if one.kind == "gpu" and one.evidence not in _OWN],
            "larger, TPU": [one for one in larger if one.kind == "tpu"],
            "larger, other accelerators": [one for one in larger if one.kind == "other"],
            "larger, all": larger,
            "others": others,
            "others, own stack": [one for one in others if one.evidence in _OWN],
            "pairs": pairs,
        }
        # A table of other systems has other rows to speak of.
        headline = next((name for name in _HEADLINES if groups[name]), "others")
        return {
            "rule": __doc__.split("\n\n")[1] if __doc__ else "",
            "headline": headline,
            **summarise(groups[headline]),
            "coverage": summarise(larger or others)["coverage"],
            "groups": {name: summarise(results) for name, results in groups.items()},
            "rows": [asdict(result) for result in self.results],
            "refused": list(self.refused),
            "aside": list(self.aside),
        }


def summarise(results: Sequence[RowResult]) -> dict[str, Any]:
    """Number, median and largest error without sign, and coverage; None where there is nothing."""
    errors = [abs(result.error) for result in results]
    return {
        "num_rows": len(results),
        "median_error": statistics.median(errors) if errors else None,
        "max_error": max(errors) if errors else None,
        "coverage": sum(result.covered for result in results) / len(results) if results else None,
    }


def validate_rows(path: str | Path) -> Validation:
    """Predict the rows of a table by the three rules."""
    rows, aside = read_rows(path)
    small = _calibration_rows(rows)
    results: list[RowResult] = []
    refused: list[str] = []
    for row in rows:
        rule = "others" if row in small else "larger"
        known = [other for other in small if other is not row]
        try:
            results.append(_predict(row, *choose_evidence(row, known), rule))
        except MegabatchError as error:
            refused.append(f"line {row.line} ({row.label}, {row.world_size:,} workers): {error}")
    if not results:
        raise DataError(
            f"'{path}' has no row that the others can predict; add rows of at most {CALIBRATED_WORKERS} workers"
        )
    for smaller, larger in _pairs(rows):
        evidence = "same system" if smaller.chassis == larger.chassis else "same stack"
        try:
            results.append(_predict(larger, [smaller], evidence, "pairs"))
        except MegabatchError as error:
            refused.append(f"line {larger.line} ({larger.label}) from line {smaller.line}: {error}")
    return Validation(tuple(results), tuple(refused), tuple(aside))


def choose_evidence(row: SystemRow, rows: Sequence[SystemRow]) -> tuple[list[SystemRow], str]:
    """The rows to predict one from, of its family and stack or the nearest there are, and a key of `EVIDENCE`.

    Raises:
        DataError: nothing with this accelerator.
    """
    family = [one for one in rows if one.family == row.family]
    if stack := [one for one in family if one.stack == row.stack]:
        return stack, "same system" if any(one.chassis == row.chassis for one in stack) else "same stack"
    if framework := [one for one in family if one.framework == row.framework]:
        return framework, "other stack"
    if family:
        return family, "other framework"
    relatives = [one for one in rows if one.accelerator == row.accelerator]
    relatives = relatives or [one for one in rows if generation(one.accelerator) == generation(row.accelerator)]
    if relatives:
        return relatives, "other system"
    raise DataError(f"no calibration row has the accelerator '{row.accelerator}'; add one, or measure a node")


def _calibration_rows(rows: Sequence[SystemRow]) -> list[SystemRow]:
    """Rows of at most 64 workers, or of the smallest size that an accelerator has."""
    least: dict[str, int] = {}
    for row in rows:
        kind = generation(row.accelerator)
        least[kind] = min(least.get(kind, row.world_size), row.world_size)
    return [row for row in rows if row.world_size <= max(CALIBRATED_WORKERS, least[generation(row.accelerator)])]


def _predict(row: SystemRow, evidence_rows: Sequence[SystemRow], evidence: str, rule: str) -> RowResult:
    fit = fit_steps(evidence_rows, evidence)
    where = (row.local_batch, row.world_size, row.num_nodes)
    predicted = fit.predict(*where, logged=row.contains_evaluation)
    return RowResult(
        rule=rule,
        row=row.label,
        kind=row.kind,
        evidence=evidence,
        num_calibration_rows=len(evidence_rows),
        workers=row.world_size,
        local_batch=row.local_batch,
        measured_ms=1e3 * row.step_seconds,
        predicted_ms=1e3 * predicted.middle,
        low_ms=1e3 * predicted.low,
        high_ms=1e3 * predicted.high,
        error=predicted.middle / row.step_seconds - 1,
        covered=predicted.holds(row.step_seconds),
        warnings=tuple(fit.warnings(*where)),
    )


def _pairs(rows: Sequence[SystemRow]) -> list[tuple[SystemRow, SystemRow]]:
    """Rows that differ in the number of workers only, each smaller one with each larger one."""
    return [
        (smaller, larger)
        for smaller in rows
        for larger in rows
        if smaller.world_size < larger.world_size
        and (smaller.family, smaller.stack, smaller.local_batch) == (larger.family, larger.stack, larger.local_batch)
    ]
