"""The run folder: its files, what writes and reads them strictly, and `Run`, the lenient view of a page.

    config.toml         the resolved settings            summary.json       the result
    environment.json    versions, hosts, grid, commit    checkpoints/       see megabatch.train.checkpoint
    metrics.jsonl       one row per step                 model.safetensors  the trained model
    tensorboard/        the same rows for TensorBoard    members/           the models of a collapsed ensemble
    plan.json           what was predicted               ensemble.json      what `evaluate --ensemble` found
    ranks.json          times of every rank              membership.jsonl   who came and who went in an elastic run
    report.html         the run to look at

A row of `metrics.jsonl` describes the run after a step: `step` counts from 1, `samples` are the images seen,
`phase` is "trunk" or "collapse-<member>", `epoch` is how far the weights have come (samples / images in an epoch; a
branch counts on from where it left the trunk, and the trunk goes on from there), `noise_scale` is the smoothed noise
scale of the gradient in images where it is measured, `wall_seconds` is the time since the first step, evaluations
and checkpoints included. Rows of steps after which the model was evaluated also carry `val_*`, rows of some steps
`weights_digest`: the SHA-256 of weights and batch-norm statistics, a text.

A run reads and writes its own folder strictly: damage is an error (`read_json`, `read_metrics`). A page takes whatever
is there and whole, and says what is not (`read_run`).
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from megabatch.errors import DataError, WriteError
from megabatch.files import UnreadableError, open_regular, parse_json, read_text, write_atomically
from megabatch.report.metrics import MAX_LINE_BYTES, Metrics, iterate_rows, read_metrics_file
from megabatch.report.untrusted import bounded_lines, items, number, read_table, table, text

FILES = ("config.toml", "environment.json", "summary.json", "ranks.json", "plan.json", "ensemble.json")
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


class MetricsLog:
    """Appends rows to `metrics.jsonl`; a resumed run first cuts off the rows written after its checkpoint.

    What stays is copied into a new file of that name. A process that was held up and still has the old file open
    writes into something that nobody reads any more.
    """

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        kept = b""
        if keep_bytes and path.is_file():
            with open_regular(path) as old:
                kept = old.read(keep_bytes)
        # After a power failure the file may be shorter than the cursor and end in half a row.
        write_atomically(path, kept[: kept.rfind(b"\n") + 1])
        self._file = open(path, "ab")  # noqa: SIM115 - held open for the whole run, closed by `close`

    @property
    def num_bytes(self) -> int:
        """How long the file is: the cursor a checkpoint stores."""
        return self._file.tell()

    def append(self, row: dict[str, Any]) -> None:
        """Write one row and hand it to the operating system at once."""
        plain = {k: (None if isinstance(v, float) and not math.isfinite(v) else v) for k, v in row.items()}
        try:
            self._file.write(json.dumps(plain).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise WriteError(
                f"'{self._file.name}' cannot be written: {error.strerror}; make room there, then --resume"
            ) from None

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a row that the disk did not take: `append` has said so
            self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows in order; a torn last line, left by a killed run, is passed over. DataError for other damage."""
    line_number = 0
    try:
        with open_regular(path) as file:
            for line in bounded_lines(file, MAX_LINE_BYTES):
                line_number += 1
                row = parse_json(line or b"")
                if not isinstance(row, dict):
                    raise ValueError(f"{type(row).__name__} in place of a table")
                yield row
    except FileNotFoundError:
        raise DataError(f"'{path}' does not exist; give the folder of a run that has made steps") from None
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror}; give the folder of a run") from None
    except ValueError:
        raise DataError(f"'{path}' is damaged in line {line_number}; fix or remove that line") from None


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
    metrics, problem = read_metrics_file(folder / "metrics.jsonl")
    if problem:
        problems.append(problem)
    membership: tuple[dict[str, Any], ...] = ()
    try:
        membership = tuple(islice(iterate_rows(folder / "membership.jsonl"), MAX_CHANGES))
    except FileNotFoundError:
        pass
    except (UnreadableError, OSError) as error:
        problems.append(f"membership.jsonl {error}")
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
