"""Accuracies of collapsed ensembles, measured once per run by `megabatch evaluate --ensemble` and kept beside the run.

An arm whose metric is `ensemble.top1` or `weight_average.top1` looks at `ensemble.json` in its run folders instead of
`summary.json`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megabatch.errors import TrainingError
from megabatch.files import write_json
from megabatch.report.run import read_json
from megabatch.study import run as running
from megabatch.study.plan import Arm, Study

__all__ = ["evaluate_ensembles", "number_of_run"]

ENSEMBLE_FILE = "ensemble.json"
_PATIENCE_SECONDS = 1800.0


def number_of_run(folder: Path, metric: str) -> float | None:
    """The value of a metric: a key of the run's summary, or `part.key` of its ensemble; None when it has none."""
    part, dot, key = metric.partition(".")
    if dot and not (folder / ENSEMBLE_FILE).is_file():
        return None
    table: Any = read_json(folder / ENSEMBLE_FILE).get(part) if dot else read_json(folder / "summary.json")
    value = table.get(key or part) if isinstance(table, dict) else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def evaluate_ensembles(study: Study, output: Path) -> None:
    """Measure the ensembles that arms look at and that have finished without having been measured.

    Raises:
        TrainingError: when an evaluation fails, with its last words.
    """
    for folder in _waiting(study.arms, study, output):
        command = [*running.COMMAND, "evaluate", str(folder), "--ensemble", "--json"]
        done = subprocess.run(
            command,
            env={**os.environ, **running.ALONE},
            capture_output=True,
            text=True,
            timeout=_PATIENCE_SECONDS,
            check=False,
        )
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
            raise TrainingError(f"the ensemble of '{folder}' could not be evaluated: {last}")
        write_json(folder / ENSEMBLE_FILE, json.loads(done.stdout.strip().splitlines()[-1]))


def _waiting(arms: Sequence[Arm], study: Study, output: Path) -> list[Path]:
    folders = [output / key for arm in arms if "." in arm.metric for key in study.runs_of(arm)]
    return [
        folder
        for folder in dict.fromkeys(folders)
        if (folder / "summary.json").is_file()
        and read_json(folder / "summary.json")["status"] == "finished"
        and not (folder / ENSEMBLE_FILE).is_file()
    ]
