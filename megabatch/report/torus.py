"""The grid of workers and what moves on it, phase by phase, for any algorithm: data for the page's animation.

The phases of `megabatch.comm.phases` on the run's grid become moves between the workers that are drawn. At most
`MAX_SIDE` workers are drawn along an axis; steps, bytes and seconds are always those of the real grid.

Worked example, torus on 2x2, workers numbered row by row:

    phase                moves of a step       a worker then holds
    row reduce-scatter   0>1 1>0 2>3 3>2       half of the message, summed over its row
    column all-reduce    0>2 2>0 1>3 3>1       that half, summed over all four
    row all-gather       0>1 1>0 2>3 3>2       the whole message, summed over all four
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from megabatch.comm.phases import ALGORITHMS, WORLD, Phase, phases
from megabatch.comm.shape import GridShape
from megabatch.report.network import NetworkTimes
from megabatch.report.run import Run
from megabatch.report.untrusted import items, number, whole

__all__ = ["moves", "torus_as_data"]

MAX_SIDE = 6

Move = tuple[int, int]


def torus_as_data(run: Run, times: NetworkTimes) -> dict[str, Any] | None:
    """The animation of every algorithm on the run's grid, or None when the run folder does not tell."""
    sizes = [whole(size, 1, 10**6) for size in items(run.environment.get("grid"), 6)]
    real = [size for size in sizes if size is not None]
    if not real or len(real) != len(sizes) or math.prod(real) < 2:
        return None
    grid = GridShape(tuple(real))
    sides = [min(size, MAX_SIDE) for size in _flat(real)]
    message_bytes = times.message_bytes or whole(run.environment.get("gradient_bytes"), 1, 2**50) or 0
    return {
        "rows": sides[0],
        "columns": sides[1],
        "real_grid": grid.text,
        "is_part": sides != _flat(real),
        "message_bytes": message_bytes,
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
                "lane": phase.lane,
                "num_steps": phase.num_steps,
                "sent_share": float(phase.sent_share()),
                "share": float(phase.share),
                "seconds": seconds[index] if len(seconds) == len(phase_list) else None,
                "steps": [[list(move) for move in step] for step in moves(phase, grid, sides)],
            }
            for index, phase in enumerate(phase_list)
        ],
    }


def moves(phase: Phase, grid: GridShape, sides: Sequence[int]) -> list[tuple[Move, ...]]:
    """Who sends to whom, step by step, when a phase of `grid` is drawn on `sides[0]` rows and `sides[1]` columns."""
    axis = _drawn_axis(phase, grid)
    size = math.prod(sides) if axis == WORLD else sides[axis]
    drawn = dataclasses.replace(phase, axis=axis, size=size)
    return [one.pairs for one in drawn.transfers(GridShape(tuple(sides))) for _ in range(one.count)]


def _drawn_axis(phase: Phase, grid: GridShape) -> int:
    if phase.axis == WORLD:
        return WORLD
    return 1 if phase.axis == len(grid.sizes) - 1 else 0
