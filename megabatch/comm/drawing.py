"""Phase lists as plain tables, for run folders and the pages that draw them; prices of phases where links are known.

    {"torus": [{"name": "row reduce-scatter", "operation": "reduce_scatter", "pattern": "ring", "axis": 1, "size": 2,
                "share": [1, 1], "lane": 0, "leaders": false, "num_steps": 1, "sent_share": [1, 2]}, ...], ...}

Shares are [numerator, denominator] of the whole message. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from megabatch.comm.calibration import Calibration
from megabatch.comm.phases import ALGORITHMS, Phase, phases
from megabatch.comm.price import all_reduce_seconds, phase_seconds
from megabatch.comm.shape import GridShape
from megabatch.errors import ConfigError

__all__ = ["modelled_phases", "modelled_points", "phases_as_data"]


def phases_as_data(shape: GridShape) -> dict[str, list[dict[str, Any]]]:
    """Every algorithm that can run on this grid, phase by phase."""
    return {name: [_table(phase, shape) for phase in phases(name, shape)] for name in ALGORITHMS}


def modelled_points(calibration: Calibration, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """What the measured links say every measured algorithm should take: lines to draw through the measured points."""
    links = _links(calibration)
    if links is None:
        return []
    # The backend does as it sees fit: a line for it would be a guess.
    algorithms = sorted({point.algorithm for point in calibration.points} & ALGORITHMS.keys() - {"backend"})
    return [
        {
            "algorithm": name,
            "message_bytes": size,
            "seconds": all_reduce_seconds(phases(name, calibration.shape), calibration.shape, links, size),
        }
        for name in algorithms
        for size in sizes
    ]


def modelled_phases(calibration: Calibration, message_bytes: int) -> dict[str, list[float]]:
    """Seconds of every phase of every algorithm for one message, in the order of `phases_as_data`."""
    links = _links(calibration)
    if links is None:
        return {}
    shape = calibration.shape
    return {
        name: [phase_seconds(phase, shape, links, message_bytes) for phase in phases(name, shape)]
        for name in ALGORITHMS
    }


def _links(calibration: Calibration) -> Any:
    try:
        return calibration.links(calibration.shape)
    except ConfigError:
        return None  # only whole all-reduces were measured, no axis


def _table(phase: Phase, shape: GridShape) -> dict[str, Any]:
    return {
        "name": phase.name(shape.names),
        "operation": phase.operation,
        "pattern": phase.pattern,
        "axis": phase.axis,
        "size": phase.size,
        "share": _pair(phase.share),
        "lane": phase.lane,
        "leaders": phase.leaders,
        "num_steps": phase.num_steps,
        "sent_share": _pair(phase.sent_share()),
    }


def _pair(share: Fraction) -> list[int]:
    return [share.numerator, share.denominator]
