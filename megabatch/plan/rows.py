"""Rows of measured training systems, one per submission: the columns of MLPerf's ResNet-50 results, or a user's own.

    round, org, system, division, accel, nodes, acc_per_node, N, gbs, local_b, img_s, step_ms, ttt_s, epochs

Needed are `N`, `local_b` (or `gbs`) and `step_ms`; the rest names the family and the software stack of a row:

    family   organisation and accelerator (for NVIDIA's own machines the chassis), which share hardware
    stack    round, framework and division, which share software

Where a row of an old round leaves N out, it is read from the system's name: `dgx1_n130` is 130 nodes of 8,
`4xC4140` is 4 nodes, `2-nodes-16s` is 16 sockets. Where it leaves the nodes out, they are N over the workers of a
node: `acc_per_node`, or those of a known chassis, else 8. Rows whose columns contradict one another are refused; one
whose nodes do not hold its N workers is used, with a remark.

Accelerators have one spelling, a generation and a kind, whatever people and result tables write:

    'NVIDIA A100-SXM4-80GB (400W)'   a100-sxm-80gb   generation a100     gpu
    system 'dgx2h_n96_ngc19.05'      dgx2h           generation v100     gpu
    system 'tpu-v3-2048'             tpu-v3          generation tpu-v3   tpu
    'Ascend 910 Pro A'               ascend-910-...  generation ascend910
"""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

from megabatch.errors import DataError
from megabatch.files import read_text
from megabatch.plan.quantity import BATCH, COUNT, GLOBAL_BATCH_SIZE, STEP, Bounds, cell_number, is_plain

UNKNOWN = "unknown"

_FRAMEWORK = re.compile(r"fjmxnet|mxnet|tensorflow|mindspore|paddlepaddle|pytorch|shampoo|jax|tf", re.IGNORECASE)
_NODES = (re.compile(r"_n(\d{1,7})(?:_|$)"), re.compile(r"^(\d{1,7})x"), re.compile(r"^(\d{1,7})-nodes?"))
_COUNTS = re.compile(r"^\d+(-nodes?-\d+s-|x|(?=r\d))|[_-]n\d+(?=_|$)|(?<=tpu-v\d)-\d+|(?<=modelarts)_\d+")
"""What in a name counts machines: without it the names of one chassis are alike."""
_USUAL_PER_NODE = 8
_SAME_RUN = 0.05
_CLEARLY_LESS, _MUCH_LESS = 0.95, 0.80
_COUNT = dataclasses.replace(COUNT, or_zero=True)
_BOUNDS: dict[str, tuple[Bounds, float]] = {
    "nodes": (_COUNT, 1.0),
    "acc_per_node": (_COUNT, 1.0),
    "N": (_COUNT, 1.0),
    "gbs": (dataclasses.replace(GLOBAL_BATCH_SIZE, or_zero=True), 1.0),
    "local_b": (dataclasses.replace(BATCH, or_zero=True), 1.0),
    "img_s": (Bounds(1e-6, 1e15, or_zero=True), 1.0),
    "step_ms": (STEP, 1e-3),
}
"""What can be in a column, and its unit; 0 where the public tables do not give it."""
_CHASSIS = {
    "dgx1": (8, "v100"),
    "dgx2h": (16, "v100"),
    "dgx2": (16, "v100"),
    "dgxa100": (8, "a100"),
    "dgxh100": (8, "h100"),
}
"""Machines that are families of their own: how many accelerators they hold, and of which generation."""
_GPU = re.compile(r"[avhplbtk]\d{1,3}(?!\d|fx)|gh\d+|mi\d+|rtx|dgx|geforce|titan")
_TEXTS = ("round", "org", "system", "division", "accel")


@dataclass(frozen=True, slots=True)
class SystemRow:
    """One system: how long a step takes at a local batch on so many workers."""

    line: int
    family: str
    stack: str
    accelerator: str
    chassis: str
    system: str
    world_size: int
    num_nodes: int
    local_batch: float
    step_seconds: float

    @property
    def kind(self) -> str:
        """ "tpu", "gpu" or "other"."""
        return kind_of(self.accelerator)

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


def read_rows(path: str | Path) -> tuple[list[SystemRow], list[str]]:
    """The usable rows, and a sentence for each row that was left aside or is doubted.

    Raises:
        DataError: no such table, a value that cannot be, or rows that contradict each other.
    """
    columns, table = read_table(path, f"'{path}'", "a CSV of measured systems")
    if not {"N", "step_ms"} <= set(columns) or not {"local_b", "gbs"} & set(columns):
        raise DataError(
            f"'{path}' has columns {', '.join(sorted(columns)) or 'none'}; needed are N, step_ms and local_b or gbs"
        )
    rows: list[SystemRow] = []
    remarks: list[str] = []
    for line, cells in table:
        row, remark = _read_row(cells, line, f"'{path}' line {line}")
        rows += [row] if row else []
        remarks += [f"line {line} ({cells.get('system', '')}): {remark}"] if remark else []
    _refuse_unlike_twins(rows, str(path))
    if not rows:
        raise DataError(f"'{path}' has no row with a number of workers and a local batch; fill in N and local_b")
    return rows, remarks


def read_table(path: str | Path, name: str, wanted: str) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """The columns of a CSV, and every row with its line; `name` and `wanted` say in errors what it is and should be."""
    try:
        text = read_text(Path(path)).removeprefix("\ufeff")  # spreadsheets put a mark in front
        reader = csv.DictReader(io.StringIO(text, newline=""))
        reader.fieldnames = columns = [column.strip() for column in reader.fieldnames or ()]
        rows = [
            (reader.line_num, {key: (value or "").strip() for key, value in cells.items() if key}) for cells in reader
        ]
    except (OSError, csv.Error) as error:
        raise DataError(f"{name} cannot be read ({error}); give {wanted}") from None
    return columns, rows


def refuse_contradicting(rows: Sequence[SystemRow], source: str | Path) -> None:
    """Refuse rows of one family and stack that no law of step times can fit together.

    A worker with no fewer images among no fewer workers cannot be clearly faster: by more than 5 % where workers,
    nodes and chassis are the same and only the batch is larger, by more than 20 % elsewhere.
    """
    for less, more in permutations(rows, 2):
        workers, images = more.world_size - less.world_size, more.local_batch - less.local_batch
        if workers < 0 or images < 0 or workers == images == 0:
            continue
        places = {(row.world_size, row.num_nodes, row.chassis) for row in (less, more)}
        if more.step_seconds < (_CLEARLY_LESS if len(places) == 1 else _MUCH_LESS) * less.step_seconds:
            one, other = sorted((less, more), key=lambda row: row.line)
            both = " but ".join(
                f"{row.world_size:,} workers take {1e3 * row.step_seconds:g} ms for {row.local_batch:g} images each"
                for row in (less, more)
            )
            raise DataError(
                f"'{source}' lines {one.line} and {other.line} contradict each other: {both}; fix or remove one, "
                "or tell their software apart by round or system"
            )


def _chassis_of(system: str) -> str:
    """The known machine that a system's name begins with; empty when there is none."""
    return next((name for name in _CHASSIS if re.match(rf"{name}(_|$)", system.lower())), "")


def spelled(text: str, system: str = "") -> str:
    """One spelling for one accelerator; a system's name may tell more than the column does."""
    if chassis := _chassis_of(system):
        return chassis
    if pod := re.search(r"tpu-?v\d", system.lower()):
        return pod[0].replace("tpuv", "tpu-v")
    plain = re.sub(r"\(.*?\)|nvidia|tesla|habana|amd|instinct|quadro|cts", " ", text.lower())
    plain = re.sub(r"sxm\d", "sxm", plain)
    return "-".join(word for word in re.split(r"[\s_-]+", plain) if word) or UNKNOWN


def generation(accelerator: str) -> str:
    """A spelled accelerator without memory size and board: "a100", "tpu-v4", "ascend910"."""
    if accelerator in _CHASSIS:
        return _CHASSIS[accelerator][1]
    found = re.match(r"tpu-v\d+|[a-z]+-?\d+", accelerator)
    name = found[0] if found else accelerator
    return name.replace("-", "") if found and not name.startswith("tpu") else name


def kind_of(accelerator: str) -> str:
    """Of a spelled accelerator or generation: "tpu", "gpu" or "other"."""
    if accelerator.startswith("tpu"):
        return "tpu"
    return "gpu" if _GPU.match(accelerator) else "other"


def _read_row(cells: dict[str, str], line: int, where: str) -> tuple[SystemRow | None, str]:
    """The row, when it can be used, and what is missing or doubtful."""
    for name in _TEXTS:
        if not is_plain(cells.get(name, "")):
            raise DataError(f"{where}: {name} is {cells[name]!r}; give text without line breaks or control characters")
    system = cells.get("system", "")
    step_ms = _number(cells, "step_ms", where)
    if not step_ms:
        raise DataError(f"{where} has no step_ms; give the milliseconds of a step")
    nodes, workers, doubt = _world(cells, system, where)
    if not workers:
        return None, "the number of workers is not given"
    total, rate = _number(cells, "gbs", where), _number(cells, "img_s", where)
    local = _number(cells, "local_b", where) or total / workers
    if not local:
        return None, "neither local_b nor gbs is given"
    if local < 1:
        raise DataError(f"{where}: gbs {total:g} on {workers} workers is less than an image each; fix gbs or N")
    if total and abs(local * workers / total - 1) > 0.02:
        raise DataError(
            f"{where} contradicts itself: {workers} workers x local_b {local:g} is not gbs {total:g}; "
            "fix one of the three"
        )
    if rate and total and abs(total / rate * 1e3 / step_ms - 1) > 0.05:
        raise DataError(
            f"{where} contradicts itself: gbs {total:g} at {rate:g} img_s is {total / rate * 1e3:.4g} ms a step, "
            f"step_ms says {step_ms:g}; fix one of the three"
        )
    accelerator = spelled(cells.get("accel", ""), system)
    organisation = cells.get("org", "").lower().removesuffix("emc")
    framework = "+".join(sorted({word.lower() for word in _FRAMEWORK.findall(system)}))
    is_open = cells.get("division", "").lower().startswith("open") or "_open" in system
    row = SystemRow(
        line=line,
        family=f"{organisation}:{accelerator}",
        stack=f"{'-'.join(cells.get('round', '').split())} {framework} {'open' if is_open else 'closed'}",
        accelerator=accelerator,
        chassis=_COUNTS.sub("", system.lower()),
        system=system,
        world_size=workers,
        num_nodes=nodes,
        local_batch=local,
        step_seconds=step_ms / 1e3,
    )
    return row, doubt


def _number(cells: dict[str, str], name: str, where: str) -> float:
    """The value of a cell, 0 when it is empty or not there."""
    return cell_number(text, f"{where}: {name}", *_BOUNDS[name]) if (text := cells.get(name, "")) else 0.0


def _world(cells: dict[str, str], system: str, where: str) -> tuple[int, int, str]:
    """(nodes, workers, doubt); 0 workers when neither the columns nor the name tell."""
    nodes, per_node, workers = (int(_number(cells, name, where)) for name in ("nodes", "acc_per_node", "N"))
    doubt = ""
    if nodes and per_node and workers and nodes * per_node != workers:
        doubt = f"{nodes} nodes x {per_node} is not N {workers}; N is believed"
    per_node = per_node or _CHASSIS.get(_chassis_of(system), (0, ""))[0]
    if workers:
        return nodes or -(-workers // (per_node or _USUAL_PER_NODE)), workers, doubt
    named = next((int(match[1]) for pattern in _NODES if (match := pattern.search(system))), 0)
    nodes = nodes or named or 1
    sockets = re.search(r"-(\d{1,7})s-", system)
    return nodes, int(sockets[1]) if sockets and not per_node else nodes * per_node, doubt


def _refuse_unlike_twins(rows: Sequence[SystemRow], path: str) -> None:
    """Refuse two rows of one system and batch whose times differ."""
    seen: dict[tuple[object, ...], SystemRow] = {}
    for row in rows:
        key = (row.family, row.stack, row.system, row.world_size, row.local_batch)
        before = seen.setdefault(key, row)
        if abs(row.step_seconds / before.step_seconds - 1) > _SAME_RUN:
            raise DataError(
                f"'{path}' lines {before.line} and {row.line} contradict each other: the same system and batch in "
                f"{1e3 * before.step_seconds:g} and {1e3 * row.step_seconds:g} ms; remove one, or name the stacks apart"
            )
