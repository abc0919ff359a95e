"""A cluster as the planner sees it: nodes of workers, three classes of links, step times, prices, failures.

    worker --port-- node --NIC-- rack switch --uplink-- the other racks

`cluster_file` reads it from a file, and tells bits and bytes apart there: inside, everything is bytes and seconds.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megabatch.comm.calibration import Calibration, predictions
from megabatch.comm.phases import ALGORITHMS, phases
from megabatch.comm.shape import GridShape
from megabatch.errors import ConfigError
from megabatch.machine import usable_cores
from megabatch.plan.compute import ComputeTable
from megabatch.plan.network import AllReduce, Network, price_curve
from megabatch.plan.quantity import Quantity

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
NOT_TOLD = Quantity(0.0, "unknown")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What the planner knows. Optional parts are None when unknown; `num_nodes` 0: as many as wanted.

    Rates are bytes per second of one direction of a link, latencies seconds of passing it once; all NICs of a node are
    one link, and so are the uplinks of a rack. rack_rate None: one full-rate fabric. calibration: measured costs of the
    axes of one grid, used instead of the links.
    A worker's step scatters by `straggler_deviation` of its compute and by `jitter_seconds` whatever it computes.
    straggler_ratios: measured step times over their median, which replace that law where there are any.
    first_steps_seconds: time lost once, while caches fill and kernels are chosen. measured_here: the machine at hand.
    measured_workers: how many computed at the same time when `compute` was measured; 0 when that is not known.
    """

    name: str
    title: str
    accelerator: str
    backend: str
    num_nodes: int
    workers_per_node: int
    nodes_per_rack: int
    measured_here: bool
    worker_rate: Quantity
    worker_latency: Quantity
    nic_rate: Quantity
    nic_latency: Quantity
    rack_rate: Quantity | None
    rack_latency: Quantity | None
    collectives: str
    software_latency: Quantity
    straggler_deviation: Quantity
    jitter_seconds: Quantity
    straggler_ratios: tuple[float, ...]
    loader_images_per_second: Quantity | None
    initialisation_seconds: Quantity
    first_steps_seconds: Quantity
    currency: str
    price_per_node_hour: Quantity | None
    node_mtbf_seconds: Quantity | None
    checkpoint_seconds: Quantity
    restart_seconds: Quantity
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
        return tuple(words for words, quantity in parts.items() if quantity in (None, NOT_TOLD))

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
