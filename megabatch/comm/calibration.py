"""What was measured about a network: link costs per axis and whole all-reduces, in one JSON file. Imports no torch.

`predictions` says what follows from it for every algorithm.

    {"megabatch_calibration": 1, "grid": "2x4", "num_hosts": 2, "backend": "gloo", "versions": {"torch": "2.13.0"},
     "axes": [{"latency_seconds": 0.002, "bytes_per_second": 2.5e7, ..., "name": "column", "size": 2}, ...],
     "points": [{"algorithm": "torus", "message_bytes": 1048576, "seconds": 0.089}, ...]}

It carries no date, so that the same numbers give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megabatch.comm.phases import ALGORITHMS, LIBRARY_ALGORITHMS, Phase, phases, staggered
from megabatch.comm.price import DEFAULT_SEGMENT_BYTES, LinkCost, all_reduce_seconds
from megabatch.comm.shape import GridShape, parse_grid
from megabatch.errors import ConfigError, MegabatchError, WriteError
from megabatch.files import parse_json, read_text, write_atomically

FORMAT = 1

_SEGMENTS_BYTES = (DEFAULT_SEGMENT_BYTES, 64 * 2**10, 128 * 2**10, 512 * 2**10, 2**20)


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisCost(LinkCost):
    """The measured cost of one axis of a grid, with its name and its number of ranks."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """One all-reduce as measured: the time of the slowest rank."""

    algorithm: str
    message_bytes: int
    seconds: float

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS or self.message_bytes <= 0 or not self.seconds > 0:
            raise ConfigError(f"point {self.algorithm}, {self.message_bytes} bytes, {self.seconds} s")


@dataclass(frozen=True, slots=True)
class PricedAlgorithm:
    """What one algorithm would take for one message; measured: by points of it, not by its price."""

    algorithm: str
    segment_bytes: int
    seconds: float
    measured: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """What to use for messages of about `message_bytes`. seconds: measured, or expected. reason: one line."""

    message_bytes: int
    algorithm: str
    segment_bytes: int
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measurements of one allocation laid out as one grid.

    num_hosts is 0 when unknown. backend: "gloo", "nccl". `axes` may be empty: then only the points are known.
    """

    grid: str
    num_hosts: int
    backend: str
    axes: tuple[AxisCost, ...] = ()
    points: tuple[MeasuredPoint, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = tuple(axis.size for axis in self.axes)
        if sizes and sizes != self.shape.sizes:
            raise ConfigError(f"axes of {sizes} ranks in grid {self.grid}")

    @property
    def shape(self) -> GridShape:
        """The grid that was measured."""
        return parse_grid(self.grid, [axis.name for axis in self.axes])

    def phases(self, algorithm: str, shape: GridShape, message_bytes: float) -> tuple[Phase, ...]:
        """The phases of an algorithm as they run here for such a message."""
        if self.backend != "gloo":
            return phases(algorithm, shape)
        return phases(algorithm, shape, message_bytes, separate_links=self.separate_links(shape))

    def separate_links(self, shape: GridShape) -> bool:
        """Whether rows stay inside hosts and columns leave them, if hosts hold equally many consecutive ranks."""
        return self.num_hosts > 1 and shape.world_size // self.num_hosts % shape.sizes[-1] == 0

    def links(self, shape: GridShape) -> tuple[LinkCost, ...]:
        """Link costs for the axes of `shape`, which must be the measured grid unless all its links are alike.

        Raises:
            ConfigError: the measurement says nothing about this grid.
        """
        if shape.sizes == self.shape.sizes and self.axes:
            return self.axes
        costs = [axis for axis in self.axes if axis.size > 1]
        if shape.world_size == self.shape.world_size and costs and _alike(costs):
            return (_worst(costs),) * len(shape.sizes)
        raise ConfigError(
            f"the calibration is of grid {self.grid} and says nothing about grid {shape.text}; measure that grid"
        )


def measured_seconds(points: Sequence[MeasuredPoint], algorithm: str, message_bytes: float) -> float | None:
    """Seconds of an algorithm at a size, by lines between its measured points; None if there are none.

    Below the smallest point its time holds (latency does not shrink); above the largest the last slope goes on.
    """
    known = sorted({p.message_bytes: p.seconds for p in points if p.algorithm == algorithm}.items())
    if not known:
        return None
    if message_bytes <= known[0][0]:
        return known[0][1]
    if len(known) == 1:
        return known[0][1] * message_bytes / known[0][0]
    above = next((index for index, (size, _) in enumerate(known) if size >= message_bytes), len(known) - 1)
    (low, low_seconds), (high, high_seconds) = known[above - 1], known[above]
    slope = max(0.0, (high_seconds - low_seconds) / (high - low))
    if message_bytes > high:
        return high_seconds + slope * (message_bytes - high)
    return low_seconds + (high_seconds - low_seconds) * (message_bytes - low) / (high - low)


def predictions(calibration: Calibration, shape: GridShape, message_bytes: float) -> list[PricedAlgorithm]:
    """Every algorithm with its best segment size, fastest first: priced, or measured where there are points of it.

    On a backend that does its own collectives, only algorithms that differ in what they ask of it.

    Raises:
        ConfigError: the calibration is of another grid whose links differ, or holds nothing.
    """
    names = tuple(ALGORITHMS) if calibration.backend == "gloo" else LIBRARY_ALGORITHMS
    links = calibration.links(shape) if calibration.axes else ()
    same_grid = shape.sizes == calibration.shape.sizes
    found = []
    for name in names:
        price, segment_bytes = 0.0, DEFAULT_SEGMENT_BYTES
        if links:
            price, segment_bytes = _best_segment(calibration, name, shape, links, message_bytes)
        points = [point for point in calibration.points if point.algorithm == name]
        known = measured_seconds(points, name, message_bytes) if same_grid or name == "backend" else None
        if links and known is not None and len(points) == 1 and message_bytes > points[0].message_bytes:
            # A lone point knows no slope; the price does.
            at_point, _ = _best_segment(calibration, name, shape, links, points[0].message_bytes)
            known = points[0].seconds + price - at_point
        if known is not None or links:
            seconds = price if known is None else known
            found.append(PricedAlgorithm(name, segment_bytes, seconds, measured=known is not None))
    if not any(prediction.algorithm == "backend" for prediction in found):
        raise ConfigError(f"the calibration of grid {calibration.grid} has no measurement at all; measure again")
    return sorted(found, key=lambda prediction: prediction.seconds)


def calibration_text(calibration: Calibration) -> str:
    """The file's content; equal calibrations give equal text."""
    content = {"megabatch_calibration": FORMAT, **asdict(calibration)}
    content["versions"] = dict(sorted(calibration.versions.items()))
    return json.dumps(content, indent=1) + "\n"


def calibration_from_text(text: str, source: str) -> Calibration:
    """The inverse of `calibration_text`; `source` names the file in errors."""
    try:
        content = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{source} is not JSON ({error}); give a file written by `megabatch bench`") from None
    return calibration_from_data(content, source)


def calibration_from_data(content: object, source: str) -> Calibration:
    """The calibration in the parsed content of a file."""
    if not isinstance(content, dict) or "megabatch_calibration" not in content:
        raise ConfigError(f"{source} is no calibration; give a file written by `megabatch bench allreduce`")
    if content["megabatch_calibration"] != FORMAT:
        raise ConfigError(f"{source} has another format than this version writes ({FORMAT}); measure again")
    fields = {name: value for name, value in content.items() if name != "megabatch_calibration"}
    try:
        axes = tuple(AxisCost(**axis) for axis in fields.pop("axes"))
        return Calibration(axes=axes, points=tuple(MeasuredPoint(**point) for point in fields.pop("points")), **fields)
    except (KeyError, TypeError, ValueError, AttributeError, MegabatchError) as error:
        raise ConfigError(f"{source} is damaged ({error}); measure again with `megabatch bench allreduce`") from None


def read_calibration(path: str | Path) -> Calibration:
    """Read a calibration file. Raises ConfigError for anything else."""
    try:
        text = read_text(Path(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path} ({error.strerror}); give the path of an existing file") from None
    return calibration_from_text(text, str(path))


def write_calibration_file(path: str | Path, calibration: Calibration) -> str:
    """Write the file, and its folder where there is none; returns what it wrote."""
    target, text = Path(path), calibration_text(calibration)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, text)
    except (OSError, WriteError) as error:
        raise ConfigError(f"cannot write calibration to {target} ({error}); give another path") from None
    return text


def _best_segment(
    calibration: Calibration, name: str, shape: GridShape, links: Sequence[LinkCost], message_bytes: float
) -> tuple[float, int]:
    phase_list = calibration.phases(name, shape, message_bytes)
    one_link = not calibration.separate_links(shape)

    def price(segment_bytes: int) -> float:
        return all_reduce_seconds(phase_list, shape, links, message_bytes, segment_bytes, one_link=one_link)

    if staggered(phase_list) or not any(phase.pattern in ("ring", "chain", "backend") for phase in phase_list):
        return price(DEFAULT_SEGMENT_BYTES), DEFAULT_SEGMENT_BYTES
    prices = [(price(size), size) for size in _SEGMENTS_BYTES]
    return min(prices, key=lambda price: price[0])  # the default comes first, so it wins a draw


def _alike(costs: Sequence[LinkCost]) -> bool:
    """Whether a message costs about the same on every axis, and none is shared."""
    latencies = [cost.latency_seconds for cost in costs]
    rates = [cost.bytes_per_second for cost in costs]
    shared = max(cost.ranks_per_link for cost in costs)
    return max(latencies) <= 2 * min(latencies) and max(rates) <= 2 * min(rates) and shared < 1.5


def _worst(costs: Sequence[LinkCost]) -> LinkCost:
    return LinkCost(
        max(cost.latency_seconds for cost in costs),
        min(cost.bytes_per_second for cost in costs),
        max(cost.message_overhead_seconds for cost in costs),
        max(cost.ranks_per_link for cost in costs),
    )
