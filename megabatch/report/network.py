"""The network of a run: its measured times, and what moves on the grid of workers, phase by phase, for any algorithm.

The times come from a calibration file or from what `bench allreduce --json` printed. This is the one place where
`report` reads files of `comm`: both formats are defined there.

For the page's animation the phases of `megabatch.comm.phases` on the run's grid become moves between the workers that
are drawn. At most `MAX_SIDE` workers are drawn along an axis; steps, bytes and seconds are always those of the real
grid. Worked example, torus on 2x2, workers numbered row by row:

    phase                moves of a step       a worker then holds
    row reduce-scatter   0>1 1>0 2>3 3>2       half of the message, summed over its row
    column all-reduce    0>2 2>0 1>3 3>1       that half, summed over all four
    row all-gather       0>1 1>0 2>3 3>2       the whole message, summed over all four
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megabatch.comm.calibration import Calibration, calibration_from_data
from megabatch.comm.phases import ALGORITHMS, WORLD, Phase, phases
from megabatch.comm.price import all_reduce_seconds, phase_seconds
from megabatch.comm.shape import GridShape
from megabatch.errors import ConfigError, DataError
from megabatch.files import UnreadableError
from megabatch.report.figure import ALGORITHM_COLORS, Axis, Figure, Missing, Series, algorithm_color
from megabatch.report.run import Run
from megabatch.report.untrusted import items, number, read_table, table, text, whole
from megabatch.text import bytes_text

TITLE = "All-reduce time by message size"
_NEEDED = "give a file of `megabatch bench allreduce --output`"
_LINE_POINTS = 25
MAX_SIDE = 6


@dataclass(frozen=True, slots=True)
class NetworkTimes:
    """What is known of the network: rows of `bench allreduce --json` or points of a calibration, and modelled lines.

    modelled: (bytes, seconds) by algorithm. phase_seconds: modelled seconds of each phase of each algorithm for a
    message of `message_bytes`.
    """

    measured: tuple[dict[str, Any], ...] = ()
    modelled: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    phase_seconds: dict[str, list[float]] = field(default_factory=dict)
    message_bytes: int = 0
    source: str = ""


def network_times(runs: Sequence[Run], path: Path | None = None) -> NetworkTimes:
    """From the file that was given (DataError if it is unusable), or the first run folder with a `calibration.json`."""
    if path is not None:
        return read_network(path, _gradient_bytes(runs[0]))
    for run in runs:
        own = run.folder / "calibration.json"
        if own.is_file():
            with contextlib.suppress(DataError):
                return read_network(own, _gradient_bytes(run))
    return NetworkTimes()


def _gradient_bytes(run: Run) -> int:
    return whole(run.environment.get("gradient_bytes"), 1, 2**50) or 0


def read_network(path: Path, message_bytes: int = 0) -> NetworkTimes:
    """Measured points, and modelled ones where the axes were measured; `message_bytes` is what the animation sends."""
    try:
        content = read_table(path)
    except UnreadableError as error:
        raise DataError(f"'{path}' {error}; {_NEEDED}") from None
    if content is None:
        raise DataError(f"'{path}' does not exist; {_NEEDED}")
    source = text(path.name, 80)
    if "megabatch_calibration" in content:
        try:
            return _of_calibration(calibration_from_data(content, f"'{path}'"), message_bytes, source)
        except ConfigError as error:
            raise DataError(str(error)) from None
    rows = items(content.get("rows"))
    if not rows:
        raise DataError(f"'{path}' holds no all-reduce times; {_NEEDED}")
    return NetworkTimes(tuple(row for row in rows if isinstance(row, dict)), source=source)


def _of_calibration(calibration: Calibration, message_bytes: int, source: str) -> NetworkTimes:
    """Points as measured; lines and times of phases as the measured links say they should be."""
    measured = tuple(asdict(point) for point in calibration.points)
    if not calibration.axes:  # only whole all-reduces were measured
        return NetworkTimes(measured, message_bytes=message_bytes, source=source)
    shape = calibration.shape
    links, sizes = calibration.links(shape), [point.message_bytes for point in calibration.points]
    # The backend does as it sees fit: a line for it would be a guess.
    drawn = {point.algorithm for point in calibration.points} - {"backend"}
    lines = {
        name: [(s, all_reduce_seconds(phases(name, shape), shape, links, s)) for s in _spaced(min(sizes), max(sizes))]
        for name in ALGORITHM_COLORS
        if name in drawn
    }
    by_phase = {
        name: [phase_seconds(phase, shape, links, message_bytes) for phase in phases(name, shape)]
        for name in ALGORITHMS
        if message_bytes
    }
    return NetworkTimes(measured, lines, by_phase, message_bytes, source)


def _spaced(low: int, high: int) -> list[float]:
    """Sizes from `low` to `high`, equally far apart on a logarithmic axis."""
    ratio = (high / low) ** (1 / (_LINE_POINTS - 1))
    return sorted({float(round(low * ratio**step)) for step in range(_LINE_POINTS)})


@dataclass(frozen=True, slots=True)
class _Cell:
    size: int
    seconds: float
    high_seconds: float | None
    count: int | None


def all_reduce(times: NetworkTimes) -> Figure | Missing:
    """Seconds of a whole all-reduce over its size, one color per algorithm."""
    measured = _cells(times.measured)
    if not measured:
        why = "no measurement was given; make one with `megabatch bench allreduce --output FILE`, then --network FILE"
        return Missing("all_reduce", TITLE, why)
    series = []
    for algorithm, cells in measured.items():
        xs, ys = tuple(float(cell.size) for cell in cells), tuple(cell.seconds for cell in cells)
        known = [(c.seconds, c.high_seconds, c.count) for c in cells if c.high_seconds is not None and c.count]
        # p95 is only shown where every cell of the algorithm has one.
        low, high, count = (tuple(v) for v in zip(*known, strict=True)) if len(known) == len(cells) else ((), (), ())
        series.append(Series(algorithm, algorithm_color(algorithm), xs, ys, mark="points", low=low, high=high, n=count))
    for algorithm, line in times.modelled.items():
        name, (xs, ys) = f"{algorithm}, modelled", zip(*line, strict=True)
        series.append(Series(name, algorithm_color(algorithm), xs, ys, tag="simulated", dashed=True))
    caption = "Points: median over rounds of the slowest rank"
    caption += ", bars up to p95, n on hover." if any(one.n for one in series) else "."
    if times.modelled:
        caption += " Lines: the phase list priced with the latency and bandwidth measured on each axis."
    if times.source:
        caption += f" From {times.source}."
    x, y = Axis("message [bytes]", "log2"), Axis("time of one all-reduce [s]", "log")
    return Figure("all_reduce", _finding(measured), caption, x, y, tuple(series))


def _cells(rows: Sequence[Any]) -> dict[str, list[_Cell]]:
    found: dict[str, dict[int, _Cell]] = {}
    for row in map(table, rows):
        name, size = text(row.get("algorithm"), 40), whole(row.get("message_bytes"), 1, 2**50)
        seconds = number(row.get("seconds")) or number(row.get("p50_seconds"))
        if name and size and seconds and seconds > 0:
            high, count = number(row.get("p95_seconds")), whole(row.get("iterations"), 1)
            found.setdefault(name, {})[size] = _Cell(size, seconds, high, count)
    known = [name for name in ALGORITHM_COLORS if name in found]
    order = known + sorted(found.keys() - set(known))
    return {name: [found[name][size] for size in sorted(found[name])] for name in order[:20]}


def _finding(measured: dict[str, list[_Cell]]) -> str:
    """The fastest algorithm at the largest size that at least two algorithms share."""
    sizes: dict[int, dict[str, float]] = {}
    for algorithm, cells in measured.items():
        for cell in cells:
            sizes.setdefault(cell.size, {})[algorithm] = cell.seconds
    shared = [size for size, by_name in sizes.items() if len(by_name) > 1]
    if not shared:
        return TITLE
    by_name = sizes[max(shared)]
    fastest = min(by_name, key=lambda name: (by_name[name], name))
    if "backend" in by_name and fastest != "backend":
        ratio = by_name["backend"] / by_name[fastest]
        return f"At {bytes_text(max(shared))} {fastest} is fastest, {ratio:.2f} times the backend's own"
    return f"At {bytes_text(max(shared))} {fastest} is fastest"


def torus_as_data(run: Run, times: NetworkTimes) -> dict[str, Any] | None:
    """The animation of every algorithm on the run's grid, or None when the run folder does not tell."""
    sizes = [whole(size, 1, 10**6) for size in items(run.environment.get("grid"), 6)]
    real = [size for size in sizes if size is not None]
    if not real or len(real) != len(sizes) or math.prod(real) < 2:
        return None
    grid = GridShape(tuple(real))
    sides = [min(size, MAX_SIDE) for size in _flat(real)]
    return {
        "rows": sides[0],
        "columns": sides[1],
        "real_grid": grid.text,
        "is_part": sides != _flat(real),
        "message_bytes": times.message_bytes or _gradient_bytes(run),
        "chosen": run.algorithm,
        "algorithms": [_algorithm(name, grid, sides, times) for name in ALGORITHMS],
    }


def _flat(sizes: Sequence[int]) -> list[int]:
    """Two sides of a drawing: the last axis runs along the rows, all slower axes are folded downwards."""
    return [math.prod(sizes[:-1]), sizes[-1]]


def _algorithm(name: str, grid: GridShape, sides: Sequence[int], times: NetworkTimes) -> dict[str, Any]:
    phase_list = phases(name, grid)
    seconds = [number(value) for value in times.phase_seconds.get(name, [])]
    return {
        "name": name,
        "phases": [
            {
                "name": phase.name(grid.names),
                "operation": phase.operation,
                "axis": _drawn_axis(phase, grid),
                "channel": phase.channel,
                "num_steps": phase.num_steps,
                "sent_share": float(phase.sent_share()),
                "share": float(phase.share),
                "seconds": seconds[index] if len(seconds) == len(phase_list) else None,
                "steps": [[list(move) for move in step] for step in moves(phase, grid, sides)],
            }
            for index, phase in enumerate(phase_list)
        ],
    }


def moves(phase: Phase, grid: GridShape, sides: Sequence[int]) -> list[tuple[tuple[int, int], ...]]:
    """Who sends to whom, step by step, when a phase of `grid` is drawn on `sides[0]` rows and `sides[1]` columns."""
    axis = _drawn_axis(phase, grid)
    size = math.prod(sides) if axis == WORLD else sides[axis]
    drawn = replace(phase, axis=axis, size=size)
    return [one.pairs for one in drawn.transfers(GridShape(tuple(sides))) for _ in range(one.count)]


def _drawn_axis(phase: Phase, grid: GridShape) -> int:
    if phase.axis == WORLD:
        return WORLD
    return 1 if phase.axis == len(grid.sizes) - 1 else 0
