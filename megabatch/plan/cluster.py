"""A cluster as the planner sees it: nodes of workers, three classes of links, step times, prices, failures.

    worker --port-- node --NIC-- rack switch --uplink-- the other racks

Files are TOML with units in the key names (`cluster_file` knows them); see `megabatch/plan/clusters` and
docs/planning.md. Inside, everything is bytes and seconds.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megabatch.comm.calibration import Calibration, predictions
from megabatch.comm.phases import ALGORITHMS, phases
from megabatch.comm.shape import GridShape
from megabatch.errors import ConfigError, nearest
from megabatch.plan.cluster_file import ClusterFile, parse_cluster
from megabatch.plan.compute import ComputeTable, check_points
from megabatch.plan.network import AllReduce, Network, price_curve
from megabatch.plan.quantity import CERTAINTIES, Quantity

__all__ = [
    *("KNOBS", "NETWORK_KNOBS", "Cluster", "cluster_names", "cluster_text", "load_cluster"),
    "read_cluster",
]

CLUSTERS = Path(__file__).parent / "clusters"

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

_NOT_TOLD = Quantity(0.0, "unknown")


@dataclass(frozen=True)
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

    name: str
    title: str
    accelerator: str
    backend: str
    collectives: str
    workers_per_node: int
    worker_rate: Quantity
    worker_latency: Quantity
    nic_rate: Quantity
    nic_latency: Quantity
    software_latency: Quantity
    compute: ComputeTable
    num_nodes: int
    nodes_per_rack: int
    rack_rate: Quantity | None
    rack_latency: Quantity | None
    straggler_deviation: Quantity
    jitter_seconds: Quantity
    straggler_ratios: tuple[float, ...]
    loader_images_per_second: Quantity | None
    initialisation_seconds: Quantity
    first_steps_seconds: Quantity
    price_per_node_hour: Quantity | None
    currency: str
    node_mtbf_seconds: Quantity | None
    checkpoint_seconds: Quantity
    restart_seconds: Quantity
    measured_here: bool
    calibration: Calibration | None = field(default=None, compare=False)
    measured_workers: int = 0

    @property
    def max_workers(self) -> float:
        """How many workers the cluster holds; infinite when the file does not say."""
        return self.num_nodes * self.workers_per_node if self.num_nodes else math.inf

    def nodes_of(self, workers: int) -> int:
        """Nodes that so many workers take."""
        return -(-workers // self.workers_per_node)

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
        """The links as plain numbers."""
        return Network(
            workers_per_node=self.workers_per_node,
            nodes_per_rack=self.nodes_per_rack,
            worker_rate=self.worker_rate.value,
            worker_latency=self.worker_latency.value,
            nic_rate=self.nic_rate.value,
            nic_latency=self.nic_latency.value,
            rack_rate=self.rack_rate.value if self.rack_rate else math.inf,
            rack_latency=self.rack_latency.value if self.rack_latency else 0.0,
            software_latency=self.software_latency.value,
            collectives=self.collectives,
        )

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


def cluster_names() -> list[str]:
    """The clusters that come with the package."""
    return sorted(path.stem for path in CLUSTERS.glob("*.toml"))


def load_cluster(name: str) -> Cluster:
    """Read a shipped cluster by name, or a TOML file."""
    return read_cluster(*cluster_text(name))


def cluster_text(name: str) -> tuple[str, str]:
    """The text of a shipped cluster, or of a TOML file, and what errors call it."""
    path = Path(name) if name.endswith(".toml") else CLUSTERS / f"{name}.toml"
    if not name.endswith(".toml") and name not in cluster_names():
        hint = nearest(name, cluster_names()) or f"; known: {', '.join(cluster_names())}"
        raise ConfigError(f"unknown cluster '{name}'{hint}; or give a TOML file, see docs/planning.md")
    try:
        return path.read_text(encoding="utf-8"), f"cluster file '{path.name}'"
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise ConfigError(f"cluster file '{name}' cannot be read ({reason}); give a TOML file") from None


def read_cluster(text: str, source: str) -> Cluster:
    """The cluster that the text of a file describes; `source` names the file in errors."""
    file = parse_cluster(text, source)
    nic, rack = file.link.nic, file.link.rack
    # What the NICs of a node could send together, before protocols take their part.
    line_rate = nic.rate.by(nic.count_per_node) if nic.count_per_node else nic.rate
    uplinks = rack.rate if rack else None
    if rack and rack.oversubscription:
        uplinks = line_rate.times(file.nodes_per_rack).over(rack.oversubscription)
    return Cluster(
        name=file.name or source,
        title=file.title,
        accelerator=file.accelerator,
        backend=file.backend,
        collectives=file.software.collectives,
        workers_per_node=file.workers_per_node,
        num_nodes=file.num_nodes,
        nodes_per_rack=file.nodes_per_rack if rack else 0,
        worker_rate=file.link.worker.rate,
        worker_latency=file.link.worker.latency,
        nic_rate=line_rate.by(nic.efficiency) if nic.efficiency else line_rate,
        nic_latency=nic.latency,
        rack_rate=uplinks,
        rack_latency=rack.latency if rack else None,
        software_latency=file.software.latency,
        compute=_compute_table(file, source),
        straggler_deviation=file.straggler.relative_deviation,
        jitter_seconds=file.straggler.deviation,
        straggler_ratios=file.straggler.measured_ratios,
        loader_images_per_second=file.loader.images_per_second_per_node,
        initialisation_seconds=file.start.initialisation or _NOT_TOLD,
        first_steps_seconds=file.start.first_steps or _NOT_TOLD,
        price_per_node_hour=file.price.per_node_hour,
        currency=file.price.currency,
        node_mtbf_seconds=file.failures.node_mtbf,
        checkpoint_seconds=file.failures.checkpoint,
        restart_seconds=file.failures.restart,
        measured_here=file.measured_here,
    )


def _compute_table(file: ClusterFile, source: str) -> ComputeTable:
    """The step times of a file; the least certain speaks for all. Those of the machine at hand are measured."""
    if file.compute is None:
        return ComputeTable("", ())
    steps = file.compute.steps(source)
    points = tuple((float(batch), one.value) for batch, one in sorted(steps.items()))
    check_points(points, source)
    certainty = max((one.certainty for one in steps.values()), key=lambda name: CERTAINTIES[name])
    return ComputeTable(file.compute.model, points, certainty, file.compute.source, file.compute.backward_share)
