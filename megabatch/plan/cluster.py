"""A cluster as the planner sees it: nodes of workers, three classes of links, step times, prices, failures.

    worker --port-- node --NIC-- rack switch --uplink-- the other racks

Every value says where it stands in a cluster file, in which units, and what it may be; `cluster_file` reads it there.
Bits and bytes are told apart here and nowhere else: inside, everything is bytes and seconds.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

from megabatch.comm.calibration import Calibration, predictions
from megabatch.comm.phases import ALGORITHMS, phases
from megabatch.comm.shape import GridShape
from megabatch.errors import ConfigError
from megabatch.machine import usable_cores
from megabatch.plan import quantity
from megabatch.plan.compute import ComputeTable
from megabatch.plan.network import AllReduce, Network, price_curve
from megabatch.plan.quantity import Bounds, Quantity, check_text, shown

RATES = {"gigabits_per_second": 1e9 / 8, "gigabytes_per_second": 1e9, "bytes_per_second": 1.0}
_TIMES = {"microseconds": 1e-6, "milliseconds": 1e-3, "seconds": 1.0, "hours": 3600.0}
_TURNED: Mapping[str, tuple[str, ...]] = {
    "compute": (),
    "worker link": ("worker_rate",),
    "NIC": ("nic_rate",),
    "rack uplink": ("rack_rate",),
    "wire latency": ("worker_latency", "nic_latency", "rack_latency"),
    "software latency": ("software_latency",),
    "stragglers": ("straggler_deviation", "jitter_seconds"),
    "loader": ("loader_images_per_second",),
}
"""The quantities of a cluster that each knob turns; the compute table and measured ratios are turned beside them."""
KNOBS = tuple(_TURNED)
"""What `Cluster.changed` can change, and what a prediction may be sensitive to."""
NETWORK_KNOBS = ("worker link", "NIC", "rack uplink", "wire latency", "software latency")

_LARGEST_SEARCH = 4096
_NOT_TOLD = Quantity(0.0, "unknown")
_DEVIATION, _JITTER = Quantity(0.01, "assumed"), Quantity(0.0, "assumed")
_CHECKPOINT, _RESTART = Quantity(20.0, "assumed"), Quantity(300.0, "assumed")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value stands in a cluster file, and what it may be.

    path: the section and the key. units: what the key's name ends in; `latency_microseconds` and
    `latency_milliseconds` are both the `latency` of their section.
    may_be: the bounds of a quantity; of any other value a check that returns it, or raises `ValueError`.
    """

    path: str
    may_be: Bounds | Callable[[object], Any]
    units: Mapping[str, float] = field(default_factory=dict)

    @property
    def section(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        """The key without its unit."""
        return self.path.rpartition(".")[2]

    @property
    def keys(self) -> dict[str, float]:
        """The keys under which it may stand, each with its unit in bytes per second or seconds."""
        if not self.units:
            return {self.name: 1.0}
        return {unit if self.name == "rate" else f"{self.name}_{unit}": size for unit, size in self.units.items()}


def _one_of(*known: str) -> Callable[[object], object]:
    def check(value: object) -> object:
        if value not in known:
            raise ValueError(f"is {shown(value)}; choose one of {', '.join(known)}")
        return value

    return check


def _count(value: object) -> int:
    return int(quantity.COUNT.check(value))


def _switch(value: object) -> object:
    if not isinstance(value, bool):
        raise ValueError(f"is {shown(value)}; give true or false")
    return value


def _ratios(value: object) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) < 2:
        raise ValueError(f"is {shown(value)}; give a list of at least 2 numbers")
    for one in value:
        if needed := quantity.RATIO.why_not(one):
            raise ValueError(f"holds {shown(one)}; {needed}")
    return tuple(map(float, value))


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What the planner knows. Optional parts are None when unknown; `num_nodes` 0: as many as wanted.

    Rates are bytes per second of one direction of a link, latencies seconds of passing it once; all NICs of a node are
    one link, and so are the uplinks of a rack. rack_rate None: one full-rate fabric. calibration: measured costs of the
    axes of one grid, used instead of the links.
    A worker's step scatters by `straggler_deviation` of its compute and by `jitter_seconds` whatever it computes.
    straggler_ratios: measured step times over their median, which replace that law where there are any.
    first_steps_seconds: time lost once, while caches fill and kernels are chosen. measured_here: the machine at hand.
    measured_workers: how many computed at the same time when `compute` was measured; 0 when that is not told.
    """

    name: Annotated[str, Place("name", check_text)] = ""
    title: Annotated[str, Place("title", check_text)] = ""
    accelerator: Annotated[str, Place("accelerator", check_text)] = ""
    backend: Annotated[str, Place("backend", _one_of("nccl", "gloo"))] = "nccl"
    num_nodes: Annotated[int, Place("num_nodes", _count)] = 0
    workers_per_node: Annotated[int, Place("workers_per_node", _count)]
    nodes_per_rack: Annotated[int, Place("nodes_per_rack", _count)] = 0
    measured_here: Annotated[bool, Place("measured_here", _switch)] = False
    worker_rate: Annotated[Quantity, Place("link.worker.rate", quantity.RATE, RATES)]
    worker_latency: Annotated[Quantity, Place("link.worker.latency", quantity.LATENCY, _TIMES)]
    nic_rate: Annotated[Quantity, Place("link.nic.rate", quantity.RATE, RATES)]
    nic_latency: Annotated[Quantity, Place("link.nic.latency", quantity.LATENCY, _TIMES)]
    rack_rate: Annotated[Quantity | None, Place("link.rack.rate", quantity.RATE, RATES)] = None
    rack_latency: Annotated[Quantity | None, Place("link.rack.latency", quantity.LATENCY, _TIMES)] = None
    collectives: Annotated[str, Place("software.collectives", _one_of("ring", "tree"))] = "ring"
    software_latency: Annotated[Quantity, Place("software.latency", quantity.LATENCY, _TIMES)]
    straggler_deviation: Annotated[Quantity, Place("straggler.relative_deviation", quantity.SCATTER)] = _DEVIATION
    jitter_seconds: Annotated[Quantity, Place("straggler.deviation", quantity.LATENCY, _TIMES)] = _JITTER
    straggler_ratios: Annotated[tuple[float, ...], Place("straggler.measured_ratios", _ratios)] = ()
    loader_images_per_second: Annotated[
        Quantity | None, Place("loader.images_per_second_per_node", Bounds(1e-3, 1e12))
    ] = None
    initialisation_seconds: Annotated[Quantity, Place("start.initialisation", quantity.DURATION, _TIMES)] = _NOT_TOLD
    first_steps_seconds: Annotated[Quantity, Place("start.first_steps", quantity.DURATION, _TIMES)] = _NOT_TOLD
    currency: Annotated[str, Place("price.currency", check_text)] = ""
    price_per_node_hour: Annotated[Quantity | None, Place("price.per_node_hour", quantity.PRICE)] = None
    node_mtbf_seconds: Annotated[Quantity | None, Place("failures.node_mtbf", quantity.MTBF, _TIMES)] = None
    checkpoint_seconds: Annotated[Quantity, Place("failures.checkpoint", quantity.CHECKPOINT, _TIMES)] = _CHECKPOINT
    restart_seconds: Annotated[Quantity, Place("failures.restart", quantity.DURATION, _TIMES)] = _RESTART
    compute: ComputeTable
    measured_workers: int = 0
    calibration: Calibration | None = field(default=None, compare=False)

    @property
    def max_workers(self) -> float:
        """How many workers the cluster holds; infinite when the file does not say."""
        return self.num_nodes * self.workers_per_node if self.num_nodes else math.inf

    def nodes_of(self, workers: int) -> int:
        """Nodes that so many workers take."""
        return -(-workers // self.workers_per_node)

    def worker_counts(self, text: str | None) -> list[int]:
        """Read "1024", "256,1024" or "64..4096" (doubling).

        Without it: the measured world where links were measured, else doubling from one node to all of the cluster; on
        the machine at hand from one worker to its cores.
        """
        if text is None:
            if self.calibration is not None:
                return [self.calibration.shape.world_size]
            if self.measured_here:
                return _doubling(1, self.measured_workers or usable_cores())
            return _doubling(self.workers_per_node, int(min(self.max_workers, _LARGEST_SEARCH)))
        try:
            counts = [int(part) for part in text.split(".." if ".." in text else ",")]
            if ".." in text and (len(counts) != 2 or not 1 <= counts[0] <= counts[1]):
                raise ValueError
        except ValueError:
            raise ConfigError(f"workers '{text}' cannot be read; write 1024, 256,1024 or 64..4096") from None
        if min(counts) < 1:
            raise ConfigError(f"workers '{text}': at least 1 is needed")
        return _doubling(*counts) if ".." in text else list(dict.fromkeys(counts))

    @property
    def unknown(self) -> tuple[str, ...]:
        """What is not known and therefore counted as free, in words."""
        parts = {
            "loader rate": self.loader_images_per_second,
            "failures of nodes": self.node_mtbf_seconds,
            "initialisation time": self.initialisation_seconds,
            "time lost in the first steps": self.first_steps_seconds,
            "price": self.price_per_node_hour,
        }
        return tuple(words for words, quantity in parts.items() if quantity in (None, _NOT_TOLD))

    @cached_property
    def network(self) -> Network:
        """The links as plain numbers; those that are not there keep their defaults."""
        known: dict[str, Any] = {one.name: getattr(self, one.name) for one in dataclasses.fields(Network)}
        plain: dict[str, Any] = {name: getattr(one, "value", one) for name, one in known.items() if one is not None}
        return Network(**plain)

    def all_reduce(self, algorithm: str, shape: GridShape, message_bytes: float) -> AllReduce:
        """The price of one message on the grid `shape`, whose ranks fill the nodes of the cluster in order.

        Raises:
            ConfigError: the algorithm is unknown, or the cluster's measurement says nothing about this grid.
        """
        if self.calibration is None:
            return price_curve(self.network, algorithm, shape).at(message_bytes)
        if algorithm not in ALGORITHMS:
            phases(algorithm, shape)  # says which are known
        whole, tiny = (
            {one.algorithm: one.seconds for one in predictions(self.calibration, shape, size)}
            for size in (message_bytes, 1)
        )
        if algorithm not in whole:
            raise ConfigError(
                f"the measured grid {self.calibration.grid} says nothing about '{algorithm}' on {self.backend}; choose "
                f"one of {', '.join(sorted(whole))}"
            )
        latency = min(whole[algorithm], tiny[algorithm])
        return AllReduce(whole[algorithm], {"latency": latency, "NIC": whole[algorithm] - latency})

    def check_holds(self, world_size: int) -> None:
        """Raise `ConfigError` when the workers do not fit."""
        if world_size < 1:
            raise ConfigError(f"{world_size} workers asked for; give at least 1")
        if world_size > self.max_workers:
            raise ConfigError(
                f"{world_size:,} workers asked for but cluster '{self.name}' holds {self.max_workers:,} "
                f"({self.num_nodes:,} nodes x {self.workers_per_node}); ask for fewer, or describe a larger cluster"
            )
        if self.measured_here and world_size > self.measured_workers > 0:
            raise ConfigError(
                f"{world_size:,} workers asked for, but the step times of this machine were measured with "
                f"{self.measured_workers:,} at a time, and more would share its cores; measure with `megabatch bench "
                f"step RECIPE --workers {world_size}`"
            )

    def deviation(self, knob: str) -> float:
        """Relative standard deviation of what a knob turns: that of its least certain number."""
        if knob == "compute":
            return self.compute.relative_deviation
        if knob == "stragglers" and self.straggler_ratios:
            # How far the standard deviation of n draws lies from that of all.
            return 1 / math.sqrt(2 * (len(self.straggler_ratios) - 1))
        quantities = (getattr(self, name) for name in _TURNED[knob])
        return max((one.relative_deviation for one in quantities if one and one.value), default=0.0)

    def changed(self, knob: str, factor: float) -> Cluster:
        """The cluster with one thing `factor` times as large: rates for links and the loader, else seconds."""
        turned: dict[str, Any] = {name: getattr(self, name) for name in _TURNED[knob]}
        turned = {name: one.times(factor) for name, one in turned.items() if one}
        if knob == "compute":
            turned["compute"] = self.compute.times(factor)
        if knob == "stragglers" and self.straggler_ratios:
            # The same mean, `factor` times as far from it; no time is below 0.
            mean = statistics.fmean(self.straggler_ratios)
            turned["straggler_ratios"] = tuple(max(0.0, mean + factor * (one - mean)) for one in self.straggler_ratios)
        return dataclasses.replace(self, **turned)


def _doubling(low: int, high: int) -> list[int]:
    """`low` and its doubles below `high`, then `high`."""
    counts = [low]
    while counts[-1] * 2 < high:
        counts.append(counts[-1] * 2)
    return [*counts, high] if high > counts[-1] else counts
