"""What a run tells about the machines it ran on: the compute time of a ghost batch, and the layers of its network.

A run that was stopped or still goes on will do: its settings, its environment and its steps are enough.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megabatch.config import Config
from megabatch.errors import DataError
from megabatch.plan.ghosts import busiest_passes
from megabatch.plan.workload import Layer
from megabatch.recipes import config_from_toml
from megabatch.report.plan_compare import LEFT_OUT_STEPS
from megabatch.report.run import read_json, read_metrics

__all__ = ["RunTimes", "read_run_times"]

_FEWEST_STEPS = 3


@dataclass(frozen=True)
class RunTimes:
    """The median over steps. layers: None in runs of versions that did not write them.

    noise: relative standard error of `seconds`. backward_share: None where the host's clock did not tell.
    """

    model: str
    ghost_batch_size: int
    seconds: float
    noise: float
    num_steps: int
    backward_share: float | None
    device: str
    workers: int
    layers: tuple[Layer, ...] | None
    image_size: int


def read_run_times(folder: Path) -> RunTimes:
    """Read a run folder.

    Raises:
        DataError, ConfigError: it is no run, is damaged, or has too few steps.
    """
    config = _config(folder)
    environment = read_json(folder / "environment.json") if (folder / "environment.json").is_file() else {}
    told = environment if "workers" in environment else read_json(folder / "summary.json")
    workers = told.get("workers")
    if not isinstance(workers, int) or workers < 1:
        raise DataError(f"run '{folder}' does not say how many workers it had; give another run")
    ghost = config.train.ghost_batch_size
    seconds, shares = [], []
    for row in list(read_metrics(folder / "metrics.jsonl"))[LEFT_OUT_STEPS:]:
        compute, batch, backward = (
            _number(row.get(name)) for name in ("compute_seconds", "global_batch_size", "backward_seconds")
        )
        if compute and batch:
            seconds.append(compute / busiest_passes(int(batch), ghost, workers))
            shares.append(backward / compute)
    if len(seconds) < _FEWEST_STEPS:
        raise DataError(
            f"run '{folder}' has {len(seconds)} timed steps after its first {LEFT_OUT_STEPS}; at least "
            f"{_FEWEST_STEPS} are needed to learn a step time from: give a longer run"
        )
    middle, share = statistics.median(seconds), statistics.median(shares)
    return RunTimes(
        config.model.label,
        ghost,
        middle,
        _noise(seconds, middle),
        len(seconds),
        share if 0 < share < 1 else None,
        str(environment.get("device", "")),
        workers,
        _layers(environment.get("layers")),
        config.data.image_size,
    )


def _config(folder: Path) -> Config:
    path = folder / "config.toml"
    try:
        return config_from_toml(path.read_text(encoding="utf-8"), f"'{path}'")
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"'{folder}' is no run folder, it has no config.toml; give the folder of a run, rows.csv, or a file of "
            "`megabatch bench`"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"'{path}' cannot be read ({error}); the run folder is damaged, give another") from None


def _noise(seconds: Sequence[float], middle: float) -> float:
    """Standard error of the median over it: 1.25 deviations over the root of n, by the middle four fifths."""
    ordered = sorted(seconds)
    spread = (ordered[int(0.9 * (len(ordered) - 1))] - ordered[int(0.1 * (len(ordered) - 1))]) / 2.56
    return 1.25 * spread / middle / math.sqrt(len(ordered))


def _layers(found: Any) -> tuple[Layer, ...] | None:
    if not isinstance(found, list) or not found:
        return None
    try:
        layers = tuple(Layer(str(one["name"]), int(one["parameters"]), float(one["work"])) for one in found)
    except (KeyError, TypeError, ValueError):
        return None
    good = all(layer.parameters > 0 and 0 <= layer.work <= 1 for layer in layers)
    return layers if good else None


def _number(value: Any) -> float:
    """A number above 0, else 0."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    return float(value) if good else 0.0
