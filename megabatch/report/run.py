"""One run folder as a page sees it: whatever is there and whole, and a word about what is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megabatch.errors import DataError
from megabatch.report.metrics import Metrics, read_metrics_file
from megabatch.report.untrusted import UnreadableError, number, read_table, table, text

__all__ = ["Run", "read_run", "read_runs", "setting"]

FILES = ("config.toml", "environment.json", "summary.json", "ranks.json", "plan.json", "ensemble.json")


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
    metrics: Metrics = field(default_factory=lambda: Metrics({}))
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
        grid = self.environment.get("grid")
        sizes = [number(size) for size in grid[:8]] if isinstance(grid, list) else []
        return "x".join(f"{size:.0f}" for size in sizes if size is not None)


def setting(run: Run, dotted: str) -> Any:
    """A setting of the run by its dotted name, or None."""
    value: Any = run.config
    for part in dotted.split("."):
        value = table(value).get(part)
    return value


def read_run(folder: Path) -> Run:
    """Read a run folder, finished, stopped or still going.

    Raises:
        DataError: it is not a run folder at all.
    """
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
    metrics, problem = read_metrics_file(folder / "metrics.jsonl")
    if problem:
        problems.append(problem)
    if not metrics.num_rows and not any(tables.values()):
        raise DataError(
            f"'{folder}' holds no run that can be read ({'; '.join(problems)}); give the folder of a run, "
            "with config.toml and metrics.jsonl in it"
        )
    return Run(
        name=text(folder.resolve().name, 80) or "run",
        folder=folder,
        metrics=metrics,
        problems=tuple(problems),
        **tables,
    )


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
        runs.append(run if name == run.name else Run(**{**run.__dict__, "name": name}))
    return runs
