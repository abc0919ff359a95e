"""A measured network as figures want it: from a calibration file, or from what `bench allreduce --json` printed.

The one place where `report` reads files of `comm`: both formats are defined there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megabatch.comm.calibration import Calibration, calibration_from_text
from megabatch.comm.phases import ALGORITHMS, phases
from megabatch.comm.price import all_reduce_seconds, phase_seconds
from megabatch.errors import ConfigError, DataError
from megabatch.report.figures.network import NetworkTimes
from megabatch.report.run import Run
from megabatch.report.untrusted import MAX_FILE_BYTES, UnreadableError, open_regular, parse_json, text, whole

__all__ = ["read_network", "times_of_run"]

_LINE_POINTS = 25


def read_network(path: Path, message_bytes: int = 0) -> NetworkTimes:
    """Measured points, and modelled ones where the axes were measured; `message_bytes` is what the animation sends.

    Raises:
        DataError: the file is neither of the two.
    """
    try:
        with open_regular(path) as file:
            data = file.read(MAX_FILE_BYTES)
        content = parse_json(data)
    except FileNotFoundError:
        raise DataError(f"'{path}' does not exist; give a file of `megabatch bench allreduce --output`") from None
    except (UnreadableError, OSError) as error:
        raise DataError(f"'{path}' {error}; give a file of `megabatch bench allreduce --output`") from None
    source = text(path.name, 80)
    if isinstance(content, dict) and "megabatch_calibration" in content:
        try:
            calibration = calibration_from_text(data.decode(), f"'{path}'")
        except (ConfigError, UnicodeDecodeError) as error:
            raise DataError(str(error)) from None
        return _of_calibration(calibration, message_bytes, source)
    rows = content if isinstance(content, list) else content.get("rows") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not rows:
        raise DataError(f"'{path}' holds no all-reduce times; give a file of `megabatch bench allreduce --output`")
    return NetworkTimes(tuple(_tables(rows)), source=source)


def times_of_run(run: Run) -> NetworkTimes:
    """The network as the run folder's own `calibration.json` tells it; nothing when there is none."""
    path = run.folder / "calibration.json"
    if not path.is_file():
        return NetworkTimes()
    try:
        return read_network(path, whole(run.environment.get("gradient_bytes"), 1, 2**50) or 0)
    except DataError:
        return NetworkTimes()


def _of_calibration(calibration: Calibration, message_bytes: int, source: str) -> NetworkTimes:
    measured = [
        {"algorithm": p.algorithm, "message_bytes": p.message_bytes, "seconds": p.seconds} for p in calibration.points
    ]
    sizes = [point.message_bytes for point in calibration.points]
    if not calibration.axes:  # only whole all-reduces were measured
        return NetworkTimes(tuple(measured), message_bytes=message_bytes, source=source)
    by_phase = _modelled_phases(calibration, message_bytes) if message_bytes else {}
    lines = _modelled_points(calibration, _spaced(min(sizes), max(sizes))) if sizes else []
    return NetworkTimes(tuple(measured), tuple(lines), by_phase, message_bytes, source)


def _modelled_points(calibration: Calibration, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """What the measured links say every measured algorithm should take: lines to draw through the measured points."""
    shape = calibration.shape
    links = calibration.links(shape)
    # The backend does as it sees fit: a line for it would be a guess.
    algorithms = sorted({point.algorithm for point in calibration.points} & ALGORITHMS.keys() - {"backend"})
    return [
        {
            "algorithm": name,
            "message_bytes": size,
            "seconds": all_reduce_seconds(phases(name, shape), shape, links, size),
        }
        for name in algorithms
        for size in sizes
    ]


def _modelled_phases(calibration: Calibration, message_bytes: int) -> dict[str, list[float]]:
    """Seconds of every phase of every algorithm for one message."""
    shape = calibration.shape
    links = calibration.links(shape)
    return {
        name: [phase_seconds(phase, shape, links, message_bytes) for phase in phases(name, shape)]
        for name in ALGORITHMS
    }


def _spaced(low: int, high: int) -> list[int]:
    """Sizes from `low` to `high`, equally far apart on a logarithmic axis."""
    ratio = (high / low) ** (1 / (_LINE_POINTS - 1))
    return sorted({round(low * ratio**step) for step in range(_LINE_POINTS)})


def _tables(rows: list[Any]) -> list[dict[str, Any]]:
    return [row for row in rows[:10_000] if isinstance(row, dict)]
