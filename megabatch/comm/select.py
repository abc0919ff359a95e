"""Chooses the all-reduce algorithm, its segments, the DDP bucket and the grid from a calibration. Imports no torch.

Every algorithm of `phases` is priced; where the calibration holds measured times of it - always so for "backend", whose
inside we do not know - those count instead. Another than the backend must win by 5 %: a draw is no reason to leave
what plain DDP does. This is the arithmetic; `auto` puts it to the proof on the machines at hand.

Bucket size (pytorch issue 118421 asks for a tool): gradients become ready evenly over the backward pass, buckets leave
in order, one all-reduce after another. Small buckets start early but pay latency often; one large bucket hides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megabatch.comm.calibration import Calibration, measured_seconds
from megabatch.comm.phases import ALGORITHMS, WORLD, num_steps, phases, staggered
from megabatch.comm.price import DEFAULT_SEGMENT_BYTES, LinkCost, all_reduce_seconds
from megabatch.comm.shape import GridShape, fitting_shapes
from megabatch.errors import ConfigError

__all__ = [
    "BACKEND_MARGIN",
    "SIZE_CLASSES_BYTES",
    "Choice",
    "Prediction",
    "choose",
    "exposed_seconds",
    "predictions",
    "size_class",
    "size_text",
    "suggest_bucket_mb",
    "suggest_grid",
    "why",
]

SIZE_CLASSES_BYTES = (16 * 2**10, 128 * 2**10, 2**20, 8 * 2**20, 32 * 2**20)
"""Messages are chosen for by the nearest of these, on a scale of ratios."""

BACKEND_MARGIN = 0.05

_SEGMENTS_BYTES = (DEFAULT_SEGMENT_BYTES, 64 * 2**10, 128 * 2**10, 512 * 2**10, 2**20)
_BUCKETS_MB = (1, 2, 4, 8, 16, 25, 50, 100, 200)
_GOOD_RATE = 0.9
_LIBRARY_ALGORITHMS = ("torus", "hierarchical", "backend")


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one algorithm would take for one message; measured: by points of it, not by its price."""

    algorithm: str
    segment_bytes: int
    seconds: float
    measured: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """What to use for messages of about `message_bytes`.

    bucket_mb: the smallest DDP bucket that reaches 90 % of the best bytes per second; `suggest_bucket_mb` knows more
    when the backward pass is known. reason: one line, for people.
    """

    message_bytes: int
    algorithm: str
    segment_bytes: int
    bucket_mb: float
    predicted_seconds: float
    reason: str


def choose(calibration: Calibration, shape: GridShape, message_bytes: int) -> Choice:
    """The algorithm that should be fastest for `message_bytes` on `shape`, or the backend's own unless it is beaten.

    Raises:
        ConfigError: the calibration is of another grid whose links differ.
    """
    ranked = predictions(calibration, shape, message_bytes)
    best = ranked[0]
    backend = next(prediction for prediction in ranked if prediction.algorithm == "backend")
    if best.seconds >= (1 - BACKEND_MARGIN) * backend.seconds:
        best = backend
    reason = why(calibration, shape, message_bytes, best, ranked)
    bucket_mb = _efficient_bucket_mb(calibration, shape)
    return Choice(message_bytes, best.algorithm, best.segment_bytes, bucket_mb, best.seconds, reason)


def predictions(calibration: Calibration, shape: GridShape, message_bytes: float) -> list[Prediction]:
    """Every algorithm with its best segment size, fastest first.

    On a backend that does its own collectives, only algorithms that differ in what they ask of it.
    """
    names = tuple(ALGORITHMS) if calibration.backend == "gloo" else _LIBRARY_ALGORITHMS
    links = calibration.links(shape) if calibration.axes else ()
    same_grid = shape.sizes == calibration.shape.sizes
    found = []
    for name in names:
        price, segment_bytes = (
            _best_segment(calibration, name, shape, links, message_bytes) if links else (0.0, DEFAULT_SEGMENT_BYTES)
        )
        points = [point for point in calibration.points if point.algorithm == name]
        known = measured_seconds(points, name, message_bytes) if same_grid or name == "backend" else None
        if links and len(points) == 1 and known is not None and message_bytes > points[0].message_bytes:
            # A lone point knows no slope; the price does.
            known = (
                points[0].seconds + price - _best_segment(calibration, name, shape, links, points[0].message_bytes)[0]
            )
        if known is not None:
            found.append(Prediction(name, segment_bytes, known, measured=True))
        elif links:
            found.append(Prediction(name, segment_bytes, price, measured=False))
    if not any(prediction.algorithm == "backend" for prediction in found):
        raise ConfigError(f"the calibration of grid {calibration.grid} has no measurement at all; measure again")
    return sorted(found, key=lambda prediction: prediction.seconds)


def size_class(message_bytes: int, classes: Sequence[int] = SIZE_CLASSES_BYTES) -> int:
    """The class nearest to a message on a scale of ratios."""
    return min(classes, key=lambda size: abs(math.log(max(1, message_bytes) / size)))


def size_text(message_bytes: int) -> str:
    """A size for people: "128 KiB"."""
    for unit, factor in (("MiB", 2**20), ("KiB", 2**10)):
        if message_bytes >= factor:
            return f"{message_bytes / factor:.4g} {unit}"
    return f"{message_bytes} bytes"


def why(
    calibration: Calibration, shape: GridShape, message_bytes: int, best: Prediction, ranked: Sequence[Prediction]
) -> str:
    """One line: what, how long against the backend, and what makes the difference."""
    backend = next(prediction for prediction in ranked if prediction.algorithm == "backend")
    head = f"{size_text(message_bytes)}: {best.algorithm}, {_told(best)}"
    if best.algorithm == "backend":
        rival = next((prediction for prediction in ranked if prediction.algorithm != "backend"), None)
        return f"{head}; " + (f"best other is {rival.algorithm}, {_told(rival)}" if rival else "nothing else is known")
    cause = (
        _cause(calibration, best.algorithm, shape, calibration.links(shape), message_bytes) if calibration.axes else ""
    )
    return f"{head} against the backend's {_told(backend)}{cause}"


def suggest_bucket_mb(
    calibration: Calibration, shape: GridShape, gradient_bytes: int, backward_seconds: float
) -> float:
    """`bucket_cap_mb` for DDP that leaves the least communication after the backward pass; the largest of equals."""
    if gradient_bytes < 1 or backward_seconds < 0:
        raise ConfigError(
            f"{gradient_bytes} bytes of gradients in {backward_seconds:g} s; give those of one backward pass"
        )
    exposed = {
        bucket_mb: exposed_seconds(calibration, shape, gradient_bytes, backward_seconds, bucket_mb)
        for bucket_mb in _BUCKETS_MB
    }
    least = min(exposed.values())
    close = least + 0.01 * (backward_seconds + least)
    return float(max(bucket_mb for bucket_mb, seconds in exposed.items() if seconds <= close))


def exposed_seconds(
    calibration: Calibration, shape: GridShape, gradient_bytes: int, backward_seconds: float, bucket_mb: float
) -> float:
    """Communication left over when the backward pass ends, with the best algorithm for each bucket."""
    bucket_bytes = min(bucket_mb * 2**20, gradient_bytes)
    num_whole, rest = divmod(gradient_bytes, bucket_bytes)
    sizes = [bucket_bytes] * int(num_whole) + ([rest] if rest else [])
    seconds = {size: predictions(calibration, shape, size)[0].seconds for size in set(sizes)}
    ready = end = 0.0
    for size in sizes:
        ready += backward_seconds * size / gradient_bytes
        end = max(end, ready) + seconds[size]
    return max(0.0, end - backward_seconds)


def suggest_grid(calibration: Calibration, message_bytes: int) -> GridShape:
    """The rows x columns grid on which `message_bytes` are reduced fastest; the measured one where links differ.

    Ranks that share a host must stay together, so another shape is considered only if all links are alike.
    """
    best = calibration.shape
    least = predictions(calibration, best, message_bytes)[0].seconds
    for shape in fitting_shapes(best.world_size):
        try:
            seconds = predictions(calibration, shape, message_bytes)[0].seconds
        except ConfigError:
            return calibration.shape
        if seconds < (1 - BACKEND_MARGIN) * least:
            best, least = shape, seconds
    return best


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


def _efficient_bucket_mb(calibration: Calibration, shape: GridShape) -> float:
    rates = [size / predictions(calibration, shape, size * 2**20)[0].seconds for size in _BUCKETS_MB]
    return float(next(size for size, rate in zip(_BUCKETS_MB, rates, strict=True) if rate >= _GOOD_RATE * max(rates)))


def _told(prediction: Prediction) -> str:
    return f"{1000 * prediction.seconds:.3g} ms {'measured' if prediction.measured else 'predicted'}"


def _cause(
    calibration: Calibration, name: str, shape: GridShape, links: Sequence[LinkCost], message_bytes: float
) -> str:
    """What an algorithm saves against a flat ring: messages that wait for one another, or bytes on slow links."""
    chosen, ring = calibration.phases(name, shape, message_bytes), phases("ring", shape)
    axes = [axis for axis, size in enumerate(shape.sizes) if size > 1]
    slow = min(axes, key=lambda axis: links[axis].rate(alone=False))
    share = sum(float(phase.sent_share()) for phase in chosen if phase.axis in (slow, WORLD))
    flat = float(ring[0].sent_share())
    mostly_latency = 2 * all_reduce_seconds(chosen, shape, links, 0) > all_reduce_seconds(
        chosen, shape, links, message_bytes
    )
    if mostly_latency or share >= flat:
        return f": {num_steps(chosen)} dependent messages, a flat ring has {num_steps(ring)}"
    return f": a rank sends {share:.2f} of the message along the {shape.names[slow]}, {flat:.2f} in a flat ring"
