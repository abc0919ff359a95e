"""The numbers of `allreduce_networks`: medians, the two ratios, targets, predictions, and the tables. Imports no torch.

Every ratio is of medians over interleaved iterations; an iteration lasts from the common start to the end of the
slowest rank. The two ratios are never mixed:

    against Gloo     Gloo's all-reduce / our torus: what a user of plain DDP gains
    like for like    our flat ring / our torus, the same code under both: what the torus itself gives

`auto` is held against the best algorithm, and the fastest of eight medians is the luckiest of eight: `auto` would lose
to it even if all were the same. So the best is chosen on one half of the rounds and compared on the other, both ways.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from typing import Any

from benchmarks.netlab.network import Network
from megabatch.comm.calibration import Calibration, predictions
from megabatch.comm.phases import phases
from megabatch.comm.price import DEFAULT_SEGMENT_BYTES, LinkCost, all_reduce_seconds
from megabatch.comm.shape import GridShape, parse_grid

__all__ = [
    "AUTO_TARGET",
    "TARGETS",
    "AutoShare",
    "CellResult",
    "Timing",
    "auto_against_best",
    "nominal_links",
    "predicted_seconds",
    "prediction_lines",
    "result_lines",
]

TARGETS: dict[tuple[str, int], tuple[float, float]] = {
    ("shared-nic", 100_000): (4.5, 1.3),
    ("shared-nic", 1_000_000): (2.4, 1.15),
    ("shared-nic", 10_000_000): (1.5, 1.25),
    ("nic-per-rank", 100_000): (4.5, 1.5),
    ("nic-per-rank", 1_000_000): (2.6, 1.9),
    ("nic-per-rank", 10_000_000): (2.4, 2.4),
    ("equal-hosts", 100_000): (5.0, 1.9),
    ("equal-hosts", 1_000_000): (1.6, 1.2),
    ("equal-hosts", 10_000_000): (1.0, 0.95),
}
"""(network, bytes) -> wanted ratios of the torus against Gloo and like for like."""

AUTO_TARGET = 0.97
_AUTO = "auto"


@dataclass(frozen=True)
class AutoShare:
    """The speed of `auto` as a part of the best algorithm's, on rounds that had no say in which one that is.

    best: what odd and even rounds chose, one name where they agree. reaches: on the other rounds, best / auto; the
    geometric mean of both ways. twin: the same for the best against itself, between two halves of the rounds that
    compare: how far noise alone takes it, with half the rounds. None where there are too few.
    """

    best: str
    reaches: float
    twin: float | None


def auto_against_best(seconds: Mapping[str, Sequence[float]]) -> AutoShare | None:
    """From the seconds of each round, by algorithm; None without `auto`, another algorithm or two rounds."""
    named = {name: list(rounds) for name, rounds in seconds.items() if name != _AUTO}
    if _AUTO not in seconds or not named or len(seconds[_AUTO]) < 2:
        return None
    chosen, ratios, twins = [], [], []
    for first in (0, 1):
        best = min(((statistics.median(rounds[first::2]), name) for name, rounds in named.items()), key=itemgetter(0))
        chosen.append(best[1])
        compared = named[best[1]][1 - first :: 2]
        ratios.append(statistics.median(compared) / statistics.median(seconds[_AUTO][1 - first :: 2]))
        if len(compared) > 1:
            twins.append(statistics.median(compared[::2]) / statistics.median(compared[1::2]))
    twin = math.prod(twins) ** 0.5 if len(twins) == 2 else None
    return AutoShare(" or ".join(dict.fromkeys(chosen)), math.prod(ratios) ** 0.5, twin)


@dataclass(frozen=True)
class Timing:
    """Seconds of one algorithm in one cell, over `n` iterations; of each of them, where they are kept."""

    median: float
    least: float
    most: float
    n: int
    rounds: tuple[float, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, seconds_by_rank: Sequence[Sequence[float]]) -> Timing:
        """From each rank's list; the slowest rank decides an iteration."""
        slowest = [max(iteration) for iteration in zip(*seconds_by_rank, strict=True)]
        return cls(statistics.median(slowest), min(slowest), max(slowest), len(slowest), tuple(slowest))

    def __str__(self) -> str:
        return f"{1e3 * self.median:.1f} [{1e3 * self.least:.1f}-{1e3 * self.most:.1f}]"


@dataclass(frozen=True)
class CellResult:
    """One network and message size: timings by algorithm, what `auto` chose, predictions by model and algorithm."""

    network: str
    message_bytes: int
    timings: Mapping[str, Timing]
    auto_choice: str = ""
    predicted: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def ratio(self, slow: str, fast: str) -> float | None:
        """How many times faster `fast` is than `slow`, if both were measured."""
        if slow not in self.timings or fast not in self.timings:
            return None
        return self.timings[slow].median / self.timings[fast].median

    @property
    def auto(self) -> AutoShare | None:
        """`auto` against the best, on rounds that did not choose it."""
        return auto_against_best({name: timing.rounds for name, timing in self.timings.items()})

    @property
    def best(self) -> str:
        """The best algorithm that is not a chooser: by halves of the rounds where `auto` was measured, else by all."""
        if self.auto is not None:
            return self.auto.best
        named = [name for name in self.timings if name != _AUTO]
        return min(named, key=lambda name: self.timings[name].median)

    def as_json(self) -> dict[str, Any]:
        """Everything, ratios and targets included."""
        against_gloo, like_for_like = TARGETS.get((self.network, self.message_bytes), (None, None))
        return {
            "network": self.network,
            "message_bytes": self.message_bytes,
            "seconds": {name: asdict(timing) for name, timing in self.timings.items()},
            "against_gloo": self.ratio("backend", "torus"),
            "against_gloo_target": against_gloo,
            "like_for_like": self.ratio("ring", "torus"),
            "like_for_like_target": like_for_like,
            "best": self.best,
            "auto_reaches": None if self.auto is None else self.auto.reaches,
            "auto_target": AUTO_TARGET,
            "best_reaches_itself": None if self.auto is None else self.auto.twin,
            "auto_against_gloo": self.ratio("backend", "auto"),
            "auto_choice": self.auto_choice,
            "predicted_seconds": {model: dict(prices) for model, prices in self.predicted.items()},
        }


def nominal_links(network: Network, shape: GridShape) -> tuple[LinkCost, ...]:
    """What the cables alone cost on a rows-are-hosts grid; within a host nothing: no software, no copying."""
    cable = LinkCost(network.latency_ms_one_way / 1e3, network.rate_mbit_per_second * 1e6 / 8)
    if network.ranks_per_host == 1:
        return (cable,) * len(shape.sizes)
    sharing = network.ranks_per_host if network.nic == "host" else 1
    column = LinkCost(cable.latency_seconds, cable.bytes_per_second, ranks_per_link=sharing)
    return (column, LinkCost(0.0, 1e12))


def predicted_seconds(
    algorithms: Sequence[str], grid: str, message_bytes: int, calibration: Calibration | None, network: Network | None
) -> dict[str, dict[str, float]]:
    """Prices by model. "cable": rated values, nothing else. "measured": from the links as measured at the start.

    Gloo's own all-reduce is not priced: "measured" extends what was measured of it, "cable" is our ring's price.
    """
    shape = parse_grid(grid)
    models: dict[str, dict[str, float]] = {}
    if network is not None:
        links = nominal_links(network, shape)
        models["cable"] = {
            name: all_reduce_seconds(
                phases(plain, shape, message_bytes, separate_links=network.ranks_per_host > 1),
                shape,
                links,
                message_bytes,
                segment_bytes,
                one_link=network.ranks_per_host == 1,
            )
            for name, plain, segment_bytes in _priced(algorithms)
        }
    if calibration is not None:
        links = calibration.links(shape)
        models["measured"] = {
            name: all_reduce_seconds(
                calibration.phases(plain, shape, message_bytes),
                shape,
                links,
                message_bytes,
                segment_bytes,
                one_link=not calibration.separate_links(shape),
            )
            for name, plain, segment_bytes in _priced(algorithms)
        }
        known = {one.algorithm: one.seconds for one in predictions(calibration, shape, message_bytes)}
        if "backend" in algorithms:
            models["measured"]["backend"] = known["backend"]
    return models


def _priced(algorithms: Sequence[str]) -> list[tuple[str, str, int]]:
    """(name, algorithm, segment bytes) of all but `auto`, which is one of the others."""
    split = [(name, *name.partition("@")[::2]) for name in algorithms if name != "auto"]
    return [(name, plain, int(size) if size else DEFAULT_SEGMENT_BYTES) for name, plain, size in split]


def result_lines(cells: Sequence[CellResult]) -> list[str]:
    """The two tables: ratios, one row per cell; milliseconds, one row per cell and algorithm.

    "auto / best" is the speed of `auto` as a part of the best one's, "itself" the best against itself, see `AutoShare`.
    """
    head = "| network | size | n | against Gloo (wanted) | like for like (wanted) "
    head += "| best | auto / best | itself | Gloo / auto |"
    lines = [head, "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    for cell in cells:
        auto = cell.auto
        gloo, like = TARGETS.get((cell.network, cell.message_bytes), (None, None))
        columns = [
            cell.network,
            _size(cell.message_bytes),
            str(min(timing.n for timing in cell.timings.values())),
            f"{_number(cell.ratio('backend', 'torus'))} ({_number(gloo)})",
            f"{_number(cell.ratio('ring', 'torus'))} ({_number(like)})",
            cell.best,
            f"{_number(None if auto is None else auto.reaches)} ({AUTO_TARGET})",
            _number(None if auto is None else auto.twin),
            _number(cell.ratio("backend", "auto")),
        ]
        lines.append(f"| {' | '.join(columns)} |")
    lines += ["", "| network | size | algorithm | ms, median [least-most] |", "| --- | --- | --- | --- |"]
    for cell in cells:
        ordered = sorted(cell.timings.items(), key=lambda item: item[1].median)
        lines += [f"| {cell.network} | {_size(cell.message_bytes)} | {name} | {timing} |" for name, timing in ordered]
    lines += ["", "What auto chose:"]
    lines += [
        f"- {cell.network}, {_size(cell.message_bytes)}: {cell.auto_choice}" for cell in cells if cell.auto_choice
    ]
    return lines


def prediction_lines(cells: Sequence[CellResult]) -> list[str]:
    """Prices beside the measured medians, with the error of each: (predicted - measured) / measured."""
    lines = [
        "| network | size | algorithm | measured ms | price by measured links | error | by the cable alone | error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    errors: list[float] = []
    for cell in cells:
        for name, timing in cell.timings.items():
            row = [cell.network, _size(cell.message_bytes), name, f"{1e3 * timing.median:.1f}"]
            for model in ("measured", "cable"):
                price = cell.predicted.get(model, {}).get(name)
                error = None if price is None else price / timing.median - 1
                row += ["-", "-"] if price is None or error is None else [f"{1e3 * price:.1f}", f"{error:+.0%}"]
                if error is not None and model == "measured":
                    errors.append(abs(error))
            if any(name in prices for prices in cell.predicted.values()):
                lines.append(f"| {' | '.join(row)} |")
    if errors:
        median = statistics.median(errors)
        lines += [
            "",
            f"Prices from measured links: error without sign, median {median:.0%}, greatest {max(errors):.0%}",
        ]
    return lines


def _size(message_bytes: int) -> str:
    return f"{message_bytes / 1e6:g} MB" if message_bytes >= 1_000_000 else f"{message_bytes / 1e3:g} KB"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
