"""Rows of systems for the planner, read from checkouts of MLPerf's public result repositories.

    git clone https://github.com/mlcommons/training_results_v3.0
    python -m benchmarks.mlperf_rows training_results_v3.0 --after 2022-06-01 --output rows.csv
    megabatch plan --validate rows.csv

One row per system that ran ResNet-50: medians over its runs. A step is the time between the start of a block of
epochs and its evaluation, over the steps in it; the first block, which warms up, is left out. Rounds are told
apart by the folder's name. Submitters hand the same logs in again in later rounds: `--after` keeps runs that began
after a day, and of equal logs only the first counts, so that a split by rounds is a split of measurements. Of round
0.5, whose logs have another form, NVIDIA's systems are read: each node logs one `run_clear_caches`, and the batch
is that of an accelerator.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

__all__ = ["Run", "old_rows_of", "read_old_run", "read_run", "rows_of"]

IMAGES = 1_281_167
COLUMNS = (
    *("round", "org", "system", "division", "accel", "net", "nodes", "acc_per_node", "N", "gbs", "local_b", "img_s"),
    *("step_ms", "ttt_s", "ttt_cv_pct", "epochs", "runs"),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One log: when it began, its total batch, the steady step, the clocked time and the epochs of the last block."""

    began_ms: int
    global_batch_size: int
    step_seconds: float
    train_seconds: float
    epochs: float


def read_run(text: str) -> Run | None:
    """The run of one log; None when it lacks a batch, a second block or its end."""
    global_batch_size, began, ended, last_epoch = 0, 0, 0, 0.0
    block: tuple[int, float] | None = None
    steps: list[float] = []
    for event in _events(text):
        key, time_ms, more = event["key"], int(event["time_ms"]), event.get("metadata") or {}
        if key == "global_batch_size":
            global_batch_size = int(event["value"])
        elif key == "run_start":
            began = time_ms
        elif key == "run_stop" and more.get("status", "success") == "success":
            ended = time_ms
        elif key == "block_start":
            block = time_ms, float(more.get("epoch_count") or 0)
            last_epoch = max(last_epoch, float(more.get("first_epoch_num") or 0) + block[1] - 1)
        elif key in ("eval_start", "block_stop") and block is not None:
            started, epochs = block
            if epochs and global_batch_size:
                steps.append((time_ms - started) / 1e3 / (epochs * IMAGES / global_batch_size))
            block = None
    if not global_batch_size or not began or not ended or len(steps) < 2:
        return None
    return Run(began, global_batch_size, statistics.median(steps[1:]), (ended - began) / 1e3, last_epoch)


def read_old_run(text: str, workers_per_node: int) -> tuple[Run, int] | None:
    """The run of a log of round 0.5 and its number of nodes; its epochs are timed one by one."""
    marks: list[tuple[float, str]] = []
    nodes, local_batch = 0, 0
    for moment, key, value in re.findall(r":::MLPv0\.5\.0 resnet ([\d.]+) \([^)]*\) (\w+)(?:: (\S*))?", text):
        nodes += key == "run_clear_caches"
        local_batch = int(value) if key == "input_batch_size" else local_batch
        if key in ("run_start", "train_epoch", "eval_start", "eval_stop", "run_stop"):
            marks.append((float(moment), key))
    ends = ("train_epoch", "eval_start")
    epochs = [end - begin for (begin, key), (end, then) in pairwise(marks) if key == "train_epoch" and then in ends]
    global_batch_size = local_batch * nodes * workers_per_node
    if not global_batch_size or len(epochs) < 2:
        return None
    step = statistics.median(epochs[1:]) * global_batch_size / IMAGES
    seconds = marks[-1][0] - marks[0][0]
    return Run(int(1e3 * marks[0][0]), global_batch_size, step, seconds, float(len(epochs))), nodes


def old_rows_of(checkout: Path, after: datetime.date) -> Iterator[dict[str, Any]]:
    """NVIDIA's rows of round 0.5."""
    for folder in sorted(checkout.glob("v0.5.0/nvidia/submission/results/*/resnet")):
        entry = json.loads(_text(folder.parent / "entry.json"))["nodes"][0]
        per_node = int(entry["num_accelerators"])
        read = [found for path in sorted(folder.glob("result_*.txt")) if (found := read_old_run(_text(path), per_node))]
        read = [(run, nodes) for run, nodes in read if run.began_ms >= _milliseconds(after)]
        if read:
            system = {
                "number_of_nodes": read[0][1],
                "accelerators_per_node": per_node,
                "accelerator_model_name": entry["accelerator"],
                "division": "closed",
            }
            yield {**_row("0.5", folder, system, [run for run, _ in read]), "org": "NVIDIA"}


def rows_of(checkout: Path, after: datetime.date, seen: set[tuple[object, ...]]) -> Iterator[dict[str, Any]]:
    """The rows of one round; `seen` holds the runs of earlier ones and is added to."""
    found = re.search(r"v(\d+\.\d+)", checkout.name)
    for folder in sorted(checkout.glob("*/results/*/resnet")):
        runs = [run for path in sorted(folder.glob("result_*.txt")) if (run := read_run(_text(path)))]
        runs = [
            run
            for run in runs
            if run.began_ms >= _milliseconds(after) and (run.began_ms, run.train_seconds) not in seen
        ]
        seen |= {(run.began_ms, run.train_seconds) for run in runs}
        system = _system(checkout, folder)
        if runs and system is not None:
            yield _row(found[1] if found else "", folder, system, runs)


def _row(name: str, folder: Path, system: dict[str, Any], runs: Sequence[Run]) -> dict[str, Any]:
    nodes, per_node = _whole(system.get("number_of_nodes")), _whole(system.get("accelerators_per_node"))
    global_batch_size = statistics.mode(run.global_batch_size for run in runs)
    runs = [run for run in runs if run.global_batch_size == global_batch_size]
    step = statistics.median(run.step_seconds for run in runs)
    times = [run.train_seconds for run in runs]
    spread = statistics.stdev(times) / statistics.mean(times) if len(times) > 1 else 0.0
    workers = nodes * per_node
    return {
        "round": name,
        "org": folder.parents[2].name,
        "system": folder.parent.name,
        "division": system.get("division", ""),
        "accel": system.get("accelerator_model_name", ""),
        "net": str(system.get("host_networking", ""))[:40],
        "nodes": nodes,
        "acc_per_node": per_node,
        "N": workers,
        "gbs": global_batch_size,
        "local_b": f"{global_batch_size / workers:.6g}" if workers else "",
        "img_s": f"{global_batch_size / step:.0f}",
        "step_ms": f"{1e3 * step:.2f}",
        "ttt_s": f"{statistics.median(times):.1f}",
        "ttt_cv_pct": f"{100 * spread:.2f}",
        "epochs": f"{statistics.median(run.epochs for run in runs):g}",
        "runs": len(runs),
    }


def _events(text: str) -> Iterator[dict[str, Any]]:
    """The events of a log in order; lines that are cut off or mixed with other output are passed over."""
    for line in text.splitlines():
        _, mark, rest = line.partition(":::MLLOG ")
        if mark:
            try:
                event, _ = json.JSONDecoder().raw_decode(rest)
            except ValueError:
                continue
            if isinstance(event, dict) and "key" in event and "time_ms" in event:
                yield event


def _system(checkout: Path, folder: Path) -> dict[str, Any] | None:
    path = checkout / folder.parents[2].name / "systems" / f"{folder.parent.name}.json"
    try:
        content = json.loads(_text(path))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _milliseconds(day: datetime.date) -> float:
    return datetime.datetime.combine(day, datetime.time(), datetime.UTC).timestamp() * 1e3


def _whole(value: object) -> int:
    """The number at the start of a field such as "8" or "16 (two boards)"; 0 when there is none."""
    found = re.match(r"\s*(\d+)", str(value))
    return int(found[1]) if found else 0


def _write(rows: Iterable[dict[str, Any]], file: Any) -> None:
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", type=Path, metavar="CHECKOUT")
    parser.add_argument("--after", type=datetime.date.fromisoformat, default=datetime.date(1970, 1, 1), metavar="DAY")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    seen: set[tuple[object, ...]] = set()
    rows = [row for checkout in options.checkouts for row in rows_of(checkout, options.after, seen)]
    rows += [row for checkout in options.checkouts for row in old_rows_of(checkout, options.after)]
    if options.output is None:
        _write(rows, sys.stdout)
        return
    with options.output.open("w", encoding="utf-8", newline="") as file:
        _write(rows, file)
    print(f"{len(rows)} rows written to {options.output}")


if __name__ == "__main__":
    main()
