"""What `--calibrate` takes, told apart by content: rows of systems, step times, link costs, a finished run folder.

    rows.csv      whole systems (`plan.rows`): a `StepFit` of one family and software stack
    step.json     `megabatch bench step`: the compute table and the layers of a network
    links.json    `megabatch bench allreduce`: the cost of each axis of one grid
    runs/NAME     a run: its compute time by ghost batch and its network's layers, as the run measured them

Later ones replace earlier ones of the same kind. Rows must name one family and one stack: mixing software stacks is
what made predictions fail.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megabatch.comm.calibration import calibration_from_text
from megabatch.errors import ConfigError, DataError, nearest
from megabatch.plan.calibrate import StepFit, fit_steps
from megabatch.plan.cluster import Cluster
from megabatch.plan.compute import ComputeTable
from megabatch.plan.quantity import Quantity
from megabatch.plan.relatives import generation
from megabatch.plan.rows import Row, read_rows
from megabatch.plan.step_times import step_times_from_data
from megabatch.plan.workload import Layer
from megabatch.recipes import config_from_toml
from megabatch.report.record import read_json, read_metrics

__all__ = ["Evidence", "gather", "pick_rows"]

_WARM_UP_UPDATES = 3


@dataclass(frozen=True)
class Evidence:
    """A cluster with what was measured put in; layers of a network that is not stored; a fit to rows."""

    cluster: Cluster
    layers: tuple[Layer, ...] | None = None
    fit: StepFit | None = None


def gather(cluster: Cluster, paths: Sequence[str], family: str = "", stack: str = "") -> Evidence:
    """Put every calibration source into the cluster, in order.

    Raises:
        ConfigError, DataError: a source that is none of the four kinds, or that cannot determine anything.
    """
    found = Evidence(cluster)
    for text in paths:
        path = Path(text)
        if path.is_dir():
            found = dataclasses.replace(found, cluster=_with_run(found.cluster, path))
        elif path.suffix == ".csv":
            rows = pick_rows(read_rows(path)[0], cluster.accelerator, family, stack)
            found = dataclasses.replace(found, fit=fit_steps(rows))
        else:
            found = _with_json(found, path)
    if not found.cluster.compute.points:
        raise ConfigError(
            f"cluster '{cluster.name}' has no step times of its own; measure them with `megabatch bench step RECIPE "
            "--output step.json` and add --calibrate step.json"
        )
    return found


def pick_rows(rows: Sequence[Row], accelerator: str, family: str, stack: str) -> list[Row]:
    """The rows of one family and one stack; of the cluster's accelerator when no family is named."""
    kind = generation(accelerator.lower())
    chosen = [row for row in rows if (row.family == family if family else generation(row.accelerator) == kind)]
    families = sorted({row.family for row in chosen})
    if not chosen:
        known = sorted({row.family for row in rows})
        what = f"family '{family}'" if family else f"accelerator '{accelerator}'"
        raise DataError(f"no row is of {what}; name a family with --family{nearest(family, known)}, such as {known[0]}")
    if len(families) > 1:
        shown = ", ".join(families[:6]) + (", ..." if len(families) > 6 else "")
        raise DataError(f"the rows hold {len(families)} families of '{accelerator}' ({shown}); name one with --family")
    stacks = sorted({row.stack for row in chosen})
    chosen = [row for row in chosen if not stack or row.stack == stack]
    if not chosen or (len(stacks) > 1 and not stack):
        raise DataError(
            f"family '{families[0]}' has rows of the software stacks {'; '.join(stacks)}, which must not be mixed; "
            f'name one, such as --stack "{stacks[-1]}"'
        )
    return chosen


def _with_json(found: Evidence, path: Path) -> Evidence:
    try:
        text = path.read_text(encoding="utf-8")
        content: Any = json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"calibration '{path}' cannot be read ({error}); "
            "give rows.csv, a file of `megabatch bench`, or a run folder"
        ) from None
    if isinstance(content, dict) and "megabatch_step_times" in content:
        times = step_times_from_data(content, f"'{path}'")
        scatter = Quantity(max(times.deviation, 0.001), "measured", str(path))
        cluster = dataclasses.replace(found.cluster, compute=times.table, straggler_deviation=scatter)
        return dataclasses.replace(found, cluster=cluster, layers=times.layers)
    if isinstance(content, dict) and "megabatch_calibration" in content:
        calibration = calibration_from_text(text, f"'{path}'")
        return dataclasses.replace(found, cluster=dataclasses.replace(found.cluster, calibration=calibration))
    raise ConfigError(f"'{path}' is neither step times nor link costs; give a file that `megabatch bench` wrote")


def _with_run(cluster: Cluster, folder: Path) -> Cluster:
    """The compute time of a run, per ghost batch: the median over its updates after the first few."""
    config = config_from_toml((folder / "config.toml").read_text(encoding="utf-8"), f"'{folder}/config.toml'")
    workers = int(read_json(folder / "summary.json")["workers"])
    rows = list(read_metrics(folder / "metrics.jsonl"))[_WARM_UP_UPDATES:]
    if len(rows) < 3:
        raise DataError(
            f"run '{folder}' has fewer than {_WARM_UP_UPDATES + 3} updates; too few to learn a step time from"
        )
    ghost = config.train.ghost_batch
    seconds = [row["compute_seconds"] / max(1, -(-int(row["batch_total"]) // ghost // workers)) for row in rows]
    point = (float(ghost), statistics.median(seconds))
    table = ComputeTable(
        config.model.name, (point,), "measured", f"run '{folder.name}'", cluster.compute.backward_share
    )
    return dataclasses.replace(cluster, compute=table)
