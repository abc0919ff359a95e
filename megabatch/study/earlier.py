"""Rows of a `runs.csv` that an earlier session of a study wrote: they count as its runs, though their folders are gone.

Such a row says what came out, not with which settings. So a row is refused where it cannot be one of the study's runs:
an arm or seed that the study does not have, another batch, two results for one run.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from megabatch.errors import ConfigError
from megabatch.files import read_text
from megabatch.schedule.batch import parse_stages
from megabatch.study.plan import Study


@dataclass(frozen=True)
class RunResult:
    """One finished run, seen through the metric of an arm: a row of `runs.csv`."""

    arm: str
    seed: int
    percent: float
    steps: int
    epochs: float
    global_batch_size_first: int
    global_batch_size_last: int
    training_seconds: float
    workers: int
    skipped_steps: int
    diverged: bool = False


EarlierRuns = Mapping[tuple[str, int], RunResult]  # by arm and seed


def read_earlier(path: Path, study: Study) -> EarlierRuns:
    """The rows of a `runs.csv`; ConfigError where they are not of this study."""
    if study.target_percent is not None:
        raise ConfigError(
            "--earlier does not go with target_percent: rows do not say when a run reached it; leave one of both out"
        )
    try:
        reader = csv.DictReader(io.StringIO(read_text(path)), strict=True)
        wanted = [field.name for field in fields(RunResult)]
        if reader.fieldnames != wanted:
            raise ConfigError(f"'{path}' is no runs.csv of a study: its columns must be {', '.join(wanted)}")
        rows = [_row(cells) for cells in reader]
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(f"'{path}' cannot be read as runs.csv of a study: {error}") from None
    arms = {arm.name: arm for arm in study.arms}
    found: dict[tuple[str, int], RunResult] = {}
    for row in rows:
        where = f"'{path}' has a run of arm '{row.arm}' with seed {row.seed}"
        arm = arms.get(row.arm)
        if arm is None or row.seed >= arm.seeds:
            raise ConfigError(f"{where}, which the study does not have; take the row out, or the study of that time")
        batch_sizes = parse_stages(arm.config(row.seed).train.global_batch_size).global_batch_sizes
        if (row.global_batch_size_first, row.global_batch_size_last) != (batch_sizes[0], batch_sizes[-1]):
            raise ConfigError(f"{where} at another batch than the study's {batch_sizes[0]}; take the row out")
        if found.setdefault((row.arm, row.seed), row) is not row:
            raise ConfigError(f"{where} twice; take one of them out")
    return found


def _row(cells: Mapping[str, str]) -> RunResult:
    """A row of the file; ValueError when a cell is no value of its column."""
    if None in cells or None in cells.values() or cells["diverged"] not in ("True", "False"):
        raise ValueError(f"the row of arm '{cells['arm']}', seed '{cells['seed']}' is not whole")
    row = RunResult(
        arm=cells["arm"],
        seed=int(cells["seed"]),
        percent=float(cells["percent"]),
        steps=int(cells["steps"]),
        epochs=float(cells["epochs"]),
        global_batch_size_first=int(cells["global_batch_size_first"]),
        global_batch_size_last=int(cells["global_batch_size_last"]),
        training_seconds=float(cells["training_seconds"]),
        workers=int(cells["workers"]),
        skipped_steps=int(cells["skipped_steps"]),
        diverged=cells["diverged"] == "True",
    )
    if row.seed < 0 or not 0 <= row.percent <= 100 or not math.isfinite(row.epochs + row.training_seconds):
        raise ValueError(f"the row of arm '{row.arm}', seed {row.seed} has a number that cannot be")
    return row
