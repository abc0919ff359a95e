"""What `--calibrate` takes, told apart by content: rows of systems, step times, link costs, the folder of a run.

    rows.csv      whole systems (`rows`): a `StepFit` of one family and software stack
    step.json     `megabatch bench step`: the compute table and the layers of a network
    links.json    `megabatch bench allreduce`: the cost of each axis of one grid
    runs/NAME     a run: its compute time by ghost batch and its network's layers, as the run measured them; a run that
                  was stopped or still goes on will do

Later ones replace earlier ones of the same kind; step.json and a run are of one kind. Rows must name one family and
one stack: mixing software stacks is what made predictions fail. What was measured on another accelerator or with
another backend than the cluster's is refused; rows of the same accelerator in other nodes, or on PCIe boards where the
cluster has others, are evidence of "same stack" only, which is less certain.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megabatch.comm.calibration import calibration_from_data
from megabatch.config import Config
from megabatch.errors import ConfigError, DataError, nearest
from megabatch.files import parse_json, read_text
from megabatch.plan.cluster import Cluster
from megabatch.plan.compute import ComputeTable, step_times_from_data
from megabatch.plan.fit import StepFit, fit_steps
from megabatch.plan.quantity import Quantity
from megabatch.plan.rows import UNKNOWN, SystemRow, generation, kind_of, read_rows, refuse_contradicting, spelled
from megabatch.plan.workload import Layer, busiest_passes, model_layers
from megabatch.recipes import config_from_toml
from megabatch.report.metrics import LEFT_OUT_STEPS
from megabatch.report.metrics_log import read_metrics
from megabatch.report.run import CONFIG_FILE, ENVIRONMENT_FILE, METRICS_FILE, read_json

_FEWEST_STEPS = 3


@dataclass(frozen=True)
class Evidence:
    """A cluster with what was measured put in; layers of a network that is not stored; a fit to rows.

    sources: a line for people about each calibration source, in the order given.
    """

    cluster: Cluster
    layers: tuple[Layer, ...] | None = None
    fit: StepFit | None = None
    sources: tuple[str, ...] = ()


def gather(cluster: Cluster, paths: Sequence[str], family: str = "", stack: str = "") -> Evidence:
    """Put every calibration source into the cluster, in order.

    Raises:
        ConfigError, DataError: a source that is none of the four kinds, that cannot determine anything, or that is of
            other machines than the cluster.
    """
    found = Evidence(cluster)
    for path in map(Path, paths):
        if path.is_dir():
            found = _with_run(found, path)
        elif path.suffix == ".csv":
            found = _with_rows(found, path, family, stack)
        else:
            found = _with_json(found, path)
    if not found.cluster.compute.points:
        raise ConfigError(
            f"cluster '{cluster.name}' has no step times of its own; measure them with `megabatch bench step RECIPE "
            "--output step.json` and add --calibrate step.json"
        )
    if (family or stack) and found.fit is None:
        raise ConfigError(
            "--family and --stack choose among rows of systems, but no table was given; add --calibrate rows.csv"
        )
    if found.layers is None and any(Path(text).is_dir() for text in paths):
        table = found.cluster.compute
        try:
            model_layers(table.model)
        except ConfigError:
            raise DataError(
                f"{table.source} does not tell the layers of {table.model} and none are stored; run it again, or add "
                "--calibrate step.json of `megabatch bench step`"
            ) from None
    return found


def pick_rows(rows: Sequence[SystemRow], accelerator: str, family: str, stack: str) -> list[SystemRow]:
    """The rows of one family and one stack, of the cluster's accelerator where it names one."""
    kind = _named_generation(accelerator)
    known = sorted({row.family for row in rows if not kind or generation(row.accelerator) == kind})
    chosen = [row for row in rows if row.family == (family or row.family)]
    if not chosen:
        such = f", such as {known[0]}" if known else ""
        raise DataError(
            f"no row is of family '{family}'; name one of the table with --family{nearest(family, known)}{such}"
        )
    of_family, chosen = chosen, [row for row in chosen if not kind or generation(row.accelerator) == kind]
    if not chosen:
        raise DataError(_why_foreign(of_family, accelerator, family))
    families = sorted({row.family for row in chosen})
    if len(families) > 1:
        shown = ", ".join(families[:6]) + (", ..." if len(families) > 6 else "")
        of = f" of '{accelerator}'" if kind else ""
        raise DataError(f"the rows hold {len(families)} families{of} ({shown}); name one with --family")
    stacks = sorted({row.stack for row in chosen})
    chosen = [row for row in chosen if not stack or row.stack == stack]
    if not chosen or (len(stacks) > 1 and not stack):
        raise DataError(
            f"family '{families[0]}' has rows of the software stacks {'; '.join(stacks)}, which must not be mixed; "
            f'name one, such as --stack "{stacks[-1]}"'
        )
    return chosen


def _why_foreign(rows: Sequence[SystemRow], accelerator: str, family: str) -> str:
    """Why none of the rows is of the cluster's accelerator, and what to do."""
    kinds = sorted({generation(row.accelerator) for row in rows} - {UNKNOWN})
    if not kinds:
        return (
            f"the rows do not say of which accelerator they are, the cluster's is '{accelerator}'; add a column accel "
            "with the accelerator of each row"
        )
    shown = ", ".join(kinds[:6]) + (", ..." if len(kinds) > 6 else "")
    whose = f" of family '{family}'" if family else ""
    return (
        f"no row{whose} is of accelerator '{accelerator}', they are of {shown}; give rows of that accelerator, or "
        "--cluster with the machines that the rows are of"
    )


def _with_rows(found: Evidence, path: Path, family: str, stack: str) -> Evidence:
    cluster = found.cluster
    every, remarks = read_rows(path)
    rows = pick_rows(every, cluster.accelerator, family, stack)
    refuse_contradicting(rows, path)
    per_node = sorted({-(-row.world_size // row.num_nodes) for row in rows if _in_other_nodes(row, cluster)})
    on_pcie, named = "pcie" in cluster.accelerator.lower(), _named_generation(cluster.accelerator)
    other_boards = sorted({row.accelerator for row in rows if named and ("pcie" in row.accelerator) != on_pcie})
    fit = fit_steps(rows, "same stack" if per_node or other_boards else "same system")
    line = f"{path.name}: {_count(len(rows), 'row')} of {rows[0].family}, {' '.join(rows[0].stack.split())}"
    if per_node:
        sizes = ", ".join(map(str, per_node))
        line += f"; in nodes of {sizes} workers, those of the cluster hold {cluster.workers_per_node}"
    if other_boards:
        line += f"; on {', '.join(other_boards)}, the cluster has {cluster.accelerator}"
    doubts = [f"{path.name} {text}" for text in remarks if any(text.startswith(f"line {row.line} ") for row in rows)]
    return dataclasses.replace(found, fit=fit, sources=(*found.sources, line, *doubts))


def _in_other_nodes(row: SystemRow, cluster: Cluster) -> bool:
    """Whether nodes hold other numbers of workers than the cluster's; a node that was used in part may be alike."""
    if row.num_nodes > 1:
        return row.world_size != row.num_nodes * cluster.workers_per_node
    return row.world_size > cluster.workers_per_node


def _with_json(found: Evidence, path: Path) -> Evidence:
    try:
        content: Any = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"calibration '{path}' cannot be read ({error}); "
            "give rows.csv, a file of `megabatch bench`, or a run folder"
        ) from None
    if isinstance(content, dict) and "megabatch_step_times" in content:
        return _with_step_times(found, path, content)
    if isinstance(content, dict) and "megabatch_calibration" in content:
        return _with_links(found, path, content)
    raise ConfigError(f"'{path}' is neither step times nor link costs; give a file that `megabatch bench` wrote")


def _with_step_times(found: Evidence, path: Path, content: dict[str, Any]) -> Evidence:
    times = step_times_from_data(content, f"'{path}'")
    _refuse_other_device(times.device, found.cluster, f"'{path}'")
    fewest = max(2, min(row.iterations for row in times.rows))
    scatter = Quantity(max(times.deviation, 0.001), "measured", str(path), 1 / math.sqrt(2 * (fewest - 1)))
    cluster = dataclasses.replace(
        found.cluster, compute=times.table, straggler_deviation=scatter, measured_workers=times.workers
    )
    batches = ", ".join(str(row.local_batch) for row in times.rows)
    where = f"({times.device}, {_count(times.threads, 'thread')})"
    line = f"{path.name}: step times of {times.model} at {batches} images {where}"
    return dataclasses.replace(found, cluster=cluster, layers=times.layers, sources=(*found.sources, line))


def _with_links(found: Evidence, path: Path, content: dict[str, Any]) -> Evidence:
    calibration = calibration_from_data(content, f"'{path}'")
    if calibration.backend != found.cluster.backend:
        raise ConfigError(
            f"'{path}' was measured with {calibration.backend}, cluster '{found.cluster.name}' communicates with "
            f"{found.cluster.backend}; measure there with `megabatch bench allreduce`, or leave the file out"
        )
    axes, points = _count(len(calibration.axes), "axis", "axes"), _count(len(calibration.points), "all-reduce")
    line = f"{path.name}: {calibration.grid} grid with {calibration.backend}, {axes} and {points} measured"
    cluster = dataclasses.replace(found.cluster, calibration=calibration)
    return dataclasses.replace(found, cluster=cluster, sources=(*found.sources, line))


def _with_run(found: Evidence, folder: Path) -> Evidence:
    """The compute time of a run, per ghost batch: the median over its steps after the first few."""
    config, environment = _config(folder), read_json(folder / ENVIRONMENT_FILE)
    workers, device = environment.get("workers"), str(environment.get("device", ""))
    if not isinstance(workers, int) or workers < 1:
        raise DataError(f"run '{folder}' does not say how many workers it had; give another run")
    _refuse_other_device(device, found.cluster, f"run '{folder}'")
    ghost, model = config.train.ghost_batch_size, config.model.label
    seconds, shares = [], []
    for row in list(read_metrics(folder / METRICS_FILE))[LEFT_OUT_STEPS:]:
        names = ("compute_seconds", "global_batch_size", "backward_seconds")
        compute, batch, backward = (_number(row.get(name)) for name in names)
        if compute and batch:
            seconds.append(compute / busiest_passes(int(batch), ghost, workers))
            shares.append(backward / compute)
    if len(seconds) < _FEWEST_STEPS:
        raise DataError(
            f"run '{folder}' has {len(seconds)} timed steps after its first {LEFT_OUT_STEPS}; at least "
            f"{_FEWEST_STEPS} are needed to learn a step time from: give a longer run"
        )
    middle, share, ordered = statistics.median(seconds), statistics.median(shares), sorted(seconds)
    # Without a host's clock the time of the backward pass is not known.
    share = share if 0 < share < 1 else found.cluster.compute.backward_share
    # Standard error of the median: 1.25 deviations over the root of n, by the middle four fifths.
    spread = (ordered[int(0.9 * (len(ordered) - 1))] - ordered[int(0.1 * (len(ordered) - 1))]) / 2.56
    noise = 1.25 * spread / middle / math.sqrt(len(ordered))
    points, source = ((float(ghost), middle),), f"run '{folder.name}'"
    table = ComputeTable(model, points, "measured", source, share, noise, config.data.image_size)
    where = f"({device or 'device not given'}, {_count(workers, 'worker')})"
    line = f"run {folder.resolve().name}: step time of {model} at {ghost} images, n = {len(seconds):,} {where}"
    layers = _layers(environment.get("layers")) or found.layers
    cluster = dataclasses.replace(found.cluster, compute=table, measured_workers=workers)
    return dataclasses.replace(found, cluster=cluster, layers=layers, sources=(*found.sources, line))


def _refuse_other_device(device: str, cluster: Cluster, what: str) -> None:
    ours, theirs = _named_generation(cluster.accelerator), _named_generation(device)
    on_cpu = device == "cpu" and cluster.backend == "nccl" and kind_of(ours) == "gpu"
    other = kind_of(ours) == kind_of(theirs) == "gpu" and ours != theirs
    if on_cpu or other:
        raise ConfigError(
            f"{what} was measured on {device}, cluster '{cluster.name}' computes on {cluster.accelerator}; measure "
            "there, or give --cluster with the machines that it was measured on"
        )


def _named_generation(accelerator: str) -> str:
    """The generation that a cluster file or a device names; empty when it names none ("as found")."""
    found = generation(spelled(accelerator))
    return found if any(char.isdigit() for char in found) else ""


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _config(folder: Path) -> Config:
    path = folder / CONFIG_FILE
    try:
        return config_from_toml(read_text(path), f"'{path}'")
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"'{folder}' is no run folder, it has no config.toml; give the folder of a run, rows.csv, or a file of "
            "`megabatch bench`"
        ) from None
    except OSError as error:
        raise DataError(f"'{path}' cannot be read ({error}); the run folder is damaged, give another") from None


def _layers(found: Any) -> tuple[Layer, ...] | None:
    """The layers that a run wrote down; None when it did not, or they cannot be."""
    try:
        layers = tuple(Layer(str(one["name"]), int(one["parameters"]), float(one["work"])) for one in found)
    except (KeyError, TypeError, ValueError):
        return None
    good = all(layer.parameters > 0 and 0 <= layer.work <= 1 for layer in layers)
    return layers if layers and good else None


def _number(value: Any) -> float:
    """A number above 0, else 0."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    return float(value) if good else 0.0
