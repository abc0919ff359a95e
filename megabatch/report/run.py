"""The run folder: its files, and `Run`, the lenient view of a page.

    config.toml         the resolved settings            summary.json       the result
    environment.json    versions, hosts, grid, commit    checkpoints/       see megabatch.train.checkpoint
    metrics.jsonl       one row per step                 model.safetensors  the trained model
    tensorboard/        the same rows for TensorBoard    members/           the models of a collapsed ensemble
    plan.json           what was predicted               ensemble.json      what `evaluate --ensemble` found
    ranks.json          times of every rank              membership.jsonl   who came and who went in an elastic run
    report.html         the run to look at               classes.json       what `evaluate` found of every class

A run reads and writes its own folder strictly: damage is an error (`read_json`, `metrics_log`). A page takes whatever
is there and whole, and says what is not (`read_run`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from megabatch.errors import DataError
from megabatch.files import UnreadableError, parse_json, read_text
from megabatch.report.metrics import Metrics, iterate_rows, read_metrics_file
from megabatch.report.untrusted import items, number, read_table, table, text

CONFIG_FILE, ENVIRONMENT_FILE, SUMMARY_FILE = "config.toml", "environment.json", "summary.json"
RANKS_FILE, PLAN_FILE, ENSEMBLE_FILE, CLASSES_FILE = "ranks.json", "plan.json", "ensemble.json", "classes.json"
METRICS_FILE, MEMBERSHIP_FILE, PAGE_FILE = "metrics.jsonl", "membership.jsonl", "report.html"
"""Files of a run folder; those of the model are named in `train.card`."""

FILES = (CONFIG_FILE, ENVIRONMENT_FILE, SUMMARY_FILE, RANKS_FILE, PLAN_FILE, ENSEMBLE_FILE, CLASSES_FILE)
MAX_CHANGES = 1_000


def read_json(path: Path) -> dict[str, Any]:
    """Read what `megabatch.files.write_json` wrote."""
    try:
        value = parse_json(read_text(path))
    except FileNotFoundError:
        raise DataError(f"'{path}' does not exist; give the folder of a finished run") from None
    except (OSError, ValueError) as error:
        raise DataError(f"'{path}' cannot be read: {error}; the run folder is damaged") from None
    if not isinstance(value, dict):
        raise DataError(f"'{path}' holds {type(value).__name__}, a table is needed; the run folder is damaged")
    return value


@dataclass(frozen=True)
class Run:
    """All values inside the tables are still untrusted: take them with `number` and `text`."""

    name: str
    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    ranks: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    ensemble: dict[str, Any] = field(default_factory=dict)
    classes: dict[str, Any] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=lambda: Metrics({}))
    membership: tuple[dict[str, Any], ...] = ()  # rows of membership.jsonl
    problems: tuple[str, ...] = ()

    @property
    def is_finished(self) -> bool:
        return text(self.summary.get("status")) == "finished"

    @property
    def world_size(self) -> int | None:
        workers = number(self.summary.get("workers")) or number(self.environment.get("workers"))
        return int(workers) if workers else None

    @property
    def algorithm(self) -> str:
        return text(setting(self, "comm.algorithm"), 40) or "backend"

    @property
    def grid_text(self) -> str:
        sizes = [number(size) for size in items(self.environment.get("grid"), 8)]
        return "x".join(f"{size:.0f}" for size in sizes if size is not None)


def setting(run: Run, dotted: str) -> Any:
    """A setting of the run by its dotted name, or None."""
    value: Any = run.config
    for part in dotted.split("."):
        value = table(value).get(part)
    return value


def read_run(folder: Path) -> Run:
    """Read a run folder, finished, stopped or still going; DataError when it is no run folder at all."""
    if not folder.is_dir():
        raise DataError(f"'{folder}' is not a folder; give the folder of a run, for example runs/demo-20260101-120000")
    tables: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    for name in FILES:
        try:
            found = read_table(folder / name)
        except UnreadableError as error:
            problems.append(f"{name} {error}")
            found = None
        tables[name.partition(".")[0]] = found or {}
    metrics, problem = read_metrics_file(folder / METRICS_FILE)
    if problem:
        problems.append(problem)
    membership: tuple[dict[str, Any], ...] = ()
    try:
        membership = tuple(islice(iterate_rows(folder / MEMBERSHIP_FILE), MAX_CHANGES))
    except FileNotFoundError:
        pass
    except (UnreadableError, OSError) as error:
        problems.append(f"{MEMBERSHIP_FILE} {error}")
    if not metrics.num_rows and not any(tables.values()):
        raise DataError(
            f"'{folder}' holds no run that can be read ({'; '.join(problems)}); give the folder of a run, "
            "with config.toml and metrics.jsonl in it"
        )
    name = text(folder.resolve().name, 80) or "run"
    return Run(name, folder, metrics=metrics, membership=membership, problems=tuple(problems), **tables)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read several runs; those of equal name get a number so that a legend can tell them apart."""
    runs: list[Run] = []
    names: set[str] = set()
    for folder in folders:
        run = read_run(folder)
        name, count = run.name, 2
        while name in names:
            name, count = f"{run.name} ({count})", count + 1
        names.add(name)
        runs.append(replace(run, name=name))
    return runs
