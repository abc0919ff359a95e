"""Rows of measured training systems, one per submission: the columns of MLPerf's ResNet-50 results, or a user's own.

    round, org, system, division, accel, nodes, acc_per_node, N, gbs, local_b, img_s, step_ms, ttt_s, epochs

Needed are `N`, `local_b` (or `gbs`) and `step_ms`; the rest names the family and the software stack of a row:

    family   organisation and accelerator (for NVIDIA's own machines the chassis), which share hardware
    stack    round, framework and division, which share software

Where a row of an old round leaves N out, it is read from the system's name: `dgx1_n130` is 130 nodes of 8,
`4xC4140` is 4 nodes, `2-nodes-16s` is 16 sockets. Rows whose columns contradict one another are refused.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megabatch.errors import DataError

__all__ = ["Row", "read_rows"]

_CHASSIS = {"dgx1": 8, "dgx2h": 16, "dgx2": 16, "dgxa100": 8, "dgxh100": 8}
_FRAMEWORK = re.compile(r"fjmxnet|mxnet|tensorflow|mindspore|paddlepaddle|pytorch|shampoo|jax|tf", re.IGNORECASE)
_NODES = (re.compile(r"_n(\d+)(?:_|$)"), re.compile(r"^(\d+)x"), re.compile(r"^(\d+)-nodes?"))
_COUNTS = re.compile(r"^\d+(-nodes?-\d+s-|x|(?=r\d))|[_-]n\d+(?=_|$)|(?<=tpu-v\d)-\d+|(?<=modelarts)_\d+")
"""What in a name counts machines: without it the names of one chassis are alike."""
_GPU = re.compile(r"[avhplbtk]\d{1,3}(?!\d|fx)|gh\d+|mi\d+|rtx|dgx|geforce|titan")
_SAME_RUN = 0.05


@dataclass(frozen=True, slots=True)
class Row:
    """One system: how long an update takes at a local batch on so many workers."""

    line: int
    family: str
    stack: str
    accelerator: str
    chassis: str
    system: str
    num_workers: int
    num_nodes: int
    local_batch: float
    step_seconds: float
    batch_total: float
    train_seconds: float
    epochs: float

    @property
    def kind(self) -> str:
        """ "tpu", "gpu" or "other"."""
        if self.accelerator.startswith("tpu"):
            return "tpu"
        return "gpu" if _GPU.match(self.accelerator) else "other"

    @property
    def framework(self) -> str:
        """The part of the stack that names the framework; empty when the system's name does not."""
        return self.stack.split(" ")[1]

    @property
    def contains_evaluation(self) -> bool:
        """Google's logs time blocks that end with an evaluation pass."""
        return self.family.startswith("google:")

    @property
    def label(self) -> str:
        """For tables: organisation, round and system."""
        return f"{self.family.split(':')[0]} {self.stack.split(' ')[0]} {self.system}"


def read_rows(path: str | Path) -> tuple[list[Row], list[str]]:
    """The usable rows, and a sentence for each that was left aside.

    Raises:
        DataError: no such table, a value that cannot be, or rows that contradict each other.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            table = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"'{path}' cannot be read ({error}); give a CSV of measured systems") from None
    columns = set(table[0]) if table else set()
    if not table or not {"N", "step_ms"} <= columns or not columns & {"local_b", "gbs"}:
        raise DataError(
            f"'{path}' has columns {', '.join(sorted(map(str, columns))) or 'none'}; "
            "needed are N, step_ms and local_b or gbs"
        )
    rows, aside = [], []
    for line, cells in enumerate(table, start=2):
        read = _read_row({key: (value or "").strip() for key, value in cells.items() if key}, line, str(path))
        if isinstance(read, str):
            aside.append(read)
        else:
            rows.append(read)
    _refuse_contradictions(rows, str(path))
    if not rows:
        raise DataError(f"'{path}' has no row with a number of workers and a local batch; fill in N and local_b")
    return rows, aside


def _read_row(cells: dict[str, str], line: int, path: str) -> Row | str:
    system = cells.get("system", "")
    step_ms = _number(cells, "step_ms", line, path)
    if step_ms <= 0:
        raise DataError(f"'{path}' line {line}: step_ms is {step_ms:g}; it must be above 0")
    nodes, workers = _world(cells, system, line, path)
    batch_total = _number(cells, "gbs", line, path)
    local = _number(cells, "local_b", line, path) or (batch_total / workers if workers else 0.0)
    if not workers or not local:
        return f"line {line} ({system}): the number of workers is not told"
    if batch_total and abs(local * workers / batch_total - 1) > 0.02:
        raise DataError(
            f"'{path}' line {line} contradicts itself: {workers} workers x local_b {local:g} is not gbs "
            f"{batch_total:g}; mend one of the three"
        )
    rate = _number(cells, "img_s", line, path)
    if rate and batch_total and abs(batch_total / rate * 1e3 / step_ms - 1) > 0.05:
        raise DataError(
            f"'{path}' line {line} contradicts itself: gbs {batch_total:g} at {rate:g} img_s is "
            f"{batch_total / rate * 1e3:.4g} ms a step, step_ms says {step_ms:g}; mend one of the three"
        )
    accelerator = _accelerator(cells.get("accel", ""), system)
    organisation = cells.get("org", "").lower().removesuffix("emc")
    framework = _FRAMEWORK.findall(system)
    stack = [cells.get("round", ""), "+".join(sorted({word.lower() for word in framework}))]
    stack.append("open" if cells.get("division", "").lower().startswith("open") or "_open" in system else "closed")
    return Row(
        line=line,
        family=f"{organisation}:{accelerator}",
        stack=" ".join(stack),
        accelerator=accelerator,
        chassis=_COUNTS.sub("", system.lower()),
        system=system,
        num_workers=workers,
        num_nodes=nodes,
        local_batch=local,
        step_seconds=step_ms / 1e3,
        batch_total=batch_total or local * workers,
        train_seconds=_number(cells, "ttt_s", line, path),
        epochs=_number(cells, "epochs", line, path),
    )


def _number(cells: dict[str, str], name: str, line: int, path: str) -> float:
    """The value of a cell, 0 when it is empty or not there."""
    text = cells.get(name, "")
    try:
        value = float(text) if text else 0.0
    except ValueError:
        raise DataError(f"'{path}' line {line}: {name} is '{text}'; give a number") from None
    if not math.isfinite(value) or value < 0:
        raise DataError(f"'{path}' line {line}: {name} is {text}; give a finite number that is not negative")
    return value


def _world(cells: dict[str, str], system: str, line: int, path: str) -> tuple[int, int]:
    """(nodes, workers); 0 workers when neither the columns nor the name tell."""
    nodes = int(_number(cells, "nodes", line, path))
    per_node = int(_number(cells, "acc_per_node", line, path))
    workers = int(_number(cells, "N", line, path))
    if workers:
        return nodes or 1, workers
    chassis = _chassis(system)
    per_node = per_node or (_CHASSIS[chassis] if chassis else 0)
    found = next((int(match[1]) for pattern in _NODES if (match := pattern.search(system))), 1)
    nodes = max(1, nodes if per_node == 0 else found)
    sockets = re.search(r"-(\d+)s-", system)
    if not per_node and sockets:
        return nodes, int(sockets[1])
    return nodes, nodes * per_node


def _chassis(system: str) -> str:
    return next((name for name in _CHASSIS if re.match(rf"{name}(_|$)", system.lower())), "")


def _accelerator(text: str, system: str) -> str:
    """One spelling for one accelerator: 'NVIDIA A100-SXM4-80GB (400W)' is 'a100-sxm-80gb'."""
    if chassis := _chassis(system):
        return chassis
    if pod := re.search(r"tpu-?v\d", system.lower()):
        return pod[0].replace("tpuv", "tpu-v")
    plain = re.sub(r"\(.*?\)|nvidia|tesla|habana|cts", " ", text.lower())
    plain = re.sub(r"sxm\d", "sxm", plain)
    return "-".join(word for word in re.split(r"[\s_-]+", plain) if word) or "unknown"


def _refuse_contradictions(rows: Sequence[Row], path: str) -> None:
    seen: dict[tuple[object, ...], Row] = {}
    for row in rows:
        key = (row.family, row.stack, row.system, row.num_workers, row.local_batch)
        before = seen.setdefault(key, row)
        if abs(row.step_seconds / before.step_seconds - 1) > _SAME_RUN:
            raise DataError(
                f"'{path}' lines {before.line} and {row.line} contradict each other: the same system and batch in "
                f"{1e3 * before.step_seconds:g} and {1e3 * row.step_seconds:g} ms; remove one, or name the stacks apart"
            )
