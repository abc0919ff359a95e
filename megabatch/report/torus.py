"""The grid of workers and what moves on it, phase by phase, for any algorithm: data for the page's animation.

A phase list (see `megabatch.comm.drawing`, whose tables stand in `environment.json`) becomes moves between the workers
that are drawn. At most `MAX_SIDE` workers are drawn along an axis; steps, bytes and seconds are always those of the
real grid. Worked example, torus on 2x2, workers numbered row by row:

    phase                moves of a step       a worker then holds
    row reduce-scatter   0>1 1>0 2>3 3>2       half of the message, summed over its row
    column all-reduce    0>2 2>0 1>3 3>1       that half, summed over all four
    row all-gather       0>1 1>0 2>3 3>2       the whole message, summed over all four
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megabatch.report.figures.network import NetworkTimes
from megabatch.report.run import Run
from megabatch.report.untrusted import items, number, table, text, whole

__all__ = ["DrawnPhase", "drawn_phase", "moves", "torus_as_data"]

MAX_SIDE = 6
MAX_PHASES = 32
WORLD = -1
OPERATIONS = ("reduce_scatter", "all_reduce", "all_gather", "reduce", "broadcast", "exchange")
PATTERNS = ("ring", "direct", "halving", "chain", "backend")

Move = tuple[int, int]


@dataclass(frozen=True, slots=True)
class DrawnPhase:
    """One phase with its real numbers, checked."""

    name: str
    operation: str
    pattern: str
    axis: int
    lane: int
    leaders: bool
    num_steps: int
    sent_share: float
    share: float


def torus_as_data(run: Run, times: NetworkTimes) -> dict[str, Any] | None:
    """The animation of every algorithm on the run's grid, or None when the run folder does not tell."""
    sizes = [whole(size, 1, 10**6) for size in items(run.environment.get("grid"), 6)]
    real = [size for size in sizes if size is not None]
    lists = table(run.environment.get("phases"))
    if not real or len(real) != len(sizes) or math.prod(real) < 2 or not lists:
        return None
    sides = [min(size, MAX_SIDE) for size in _flat(real)]
    algorithms = []
    for name, rows in list(lists.items())[:20]:
        phases = [phase for row in items(rows, MAX_PHASES) if (phase := drawn_phase(table(row), len(real)))]
        if phases:
            algorithms.append(_algorithm(text(name, 40), phases, sides, times))
    if not algorithms:
        return None
    message_bytes = times.message_bytes or whole(run.environment.get("gradient_bytes"), 1, 2**50) or 0
    return {
        "rows": sides[0],
        "columns": sides[1],
        "real_grid": "x".join(str(size) for size in real),
        "is_part": sides != _flat(real),
        "message_bytes": message_bytes,
        "chosen": run.algorithm,
        "algorithms": algorithms,
    }


def _flat(sizes: Sequence[int]) -> list[int]:
    """Two sides of a drawing: the last axis runs along the rows, all slower axes are folded downwards."""
    return [math.prod(sizes[:-1]), sizes[-1]]


def drawn_phase(row: dict[str, Any], num_axes: int) -> DrawnPhase | None:
    """A checked phase; None for what cannot be drawn."""
    operation, pattern = text(row.get("operation")), text(row.get("pattern"))
    axis, steps = whole(row.get("axis"), WORLD, num_axes - 1), whole(row.get("num_steps"), 0)
    if operation not in OPERATIONS or pattern not in PATTERNS or axis is None or steps is None:
        return None
    return DrawnPhase(
        name=text(row.get("name"), 60) or operation,
        operation=operation,
        pattern=pattern,
        axis=WORLD if axis == WORLD else (1 if axis == num_axes - 1 else 0),
        lane=whole(row.get("lane"), 0, 8) or 0,
        leaders=row.get("leaders") is True,
        num_steps=steps,
        sent_share=_share(row.get("sent_share")),
        share=_share(row.get("share")),
    )


def _share(value: Any) -> float:
    above, below = (number(part) for part in [*items(value, 2), None, None][:2])
    return above / below if above is not None and below else 0.0


def _algorithm(name: str, phases: list[DrawnPhase], sides: list[int], times: NetworkTimes) -> dict[str, Any]:
    seconds = [number(value) for value in times.phase_seconds.get(name, [])]
    return {
        "name": name,
        "phases": [
            {
                "name": phase.name,
                "operation": phase.operation,
                "axis": phase.axis,
                "lane": phase.lane,
                "num_steps": phase.num_steps,
                "sent_share": phase.sent_share,
                "share": phase.share,
                "seconds": seconds[index] if len(seconds) == len(phases) else None,
                "steps": [[list(move) for move in step] for step in moves(phase, sides)],
            }
            for index, phase in enumerate(phases)
        ],
    }


def moves(phase: DrawnPhase, sides: Sequence[int]) -> list[list[Move]]:
    """Who sends to whom, step by step, on the grid that is drawn."""
    lines = _lines(phase, sides)
    along = [_line_steps(phase, len(line)) for line in lines]
    num_steps = max((len(steps) for steps in along), default=0)
    return [
        [
            (line[a], line[b])
            for line, steps in zip(lines, along, strict=True)
            if step < len(steps)
            for a, b in steps[step]
        ]
        for step in range(num_steps)
    ]


def _lines(phase: DrawnPhase, sides: Sequence[int]) -> list[list[int]]:
    """The workers that exchange with one another, in their order along the axis."""
    rows, columns = sides
    if phase.axis == WORLD:
        return [list(range(rows * columns))]
    if phase.axis == 1:
        lines = [[row * columns + column for column in range(columns)] for row in range(rows)]
    else:
        lines = [[row * columns + column for row in range(rows)] for column in range(columns)]
    # Leaders stand at position 0 of the faster axis.
    return lines[:1] if phase.leaders and phase.axis == 0 else lines


def _line_steps(phase: DrawnPhase, size: int) -> list[list[Move]]:
    twice = 2 if phase.operation == "all_reduce" else 1
    if size < 2:
        return []
    if phase.pattern == "direct" or phase.operation == "exchange":
        everyone = [(a, b) for a in range(size) for b in range(size) if a != b]
        return [everyone] * (1 if phase.operation == "exchange" else twice)
    if phase.pattern == "chain":
        up = [[(position, position - 1)] for position in range(size - 1, 0, -1)]
        return up if phase.operation == "reduce" else [[(b, a)] for [(a, b)] in reversed(up)]
    if phase.pattern == "halving":
        return _halving(size)
    return [[(a, (a + 1) % size) for a in range(size)]] * (twice * (size - 1))


def _halving(size: int) -> list[list[Move]]:
    """Partners at half the former distance, then back; ranks beyond a power of two hand over first and wait."""
    core = 1 << (size.bit_length() - 1)
    extra = size - core
    active = [2 * i for i in range(extra)] + list(range(2 * extra, size))
    distances = [core >> depth for depth in range(1, core.bit_length())]
    inwards = [[(active[i], active[i ^ distance]) for i in range(core)] for distance in distances]
    fold = [[(2 * i + 1, 2 * i) for i in range(extra)]] if extra else []
    unfold = [[(b, a) for a, b in step] for step in fold]
    return [*fold, *inwards, *reversed(inwards), *unfold]
