"""A cluster as the planner sees it: nodes of workers, three classes of links, step times, prices, failures.

    worker --port-- node --NIC-- rack switch --uplink-- the other racks

Files are TOML with units in the key names (`cluster_file` knows them); see `megabatch/plan/clusters` and
docs/planning.md. Inside, everything is bytes and seconds.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from megabatch.comm.calibration import Calibration, predictions
from megabatch.comm.phases import ALGORITHMS, phases
from megabatch.comm.shape import GridShape
from megabatch.errors import ConfigError, nearest
from megabatch.plan.cluster_file import ClusterFile, parse_cluster
from megabatch.plan.compute import ComputeTable, check_points
from megabatch.plan.network import AllReduce, Network, price_curve
from megabatch.plan.quantity import CERTAINTIES, Quantity

__all__ = [
    *("KNOBS", "NETWORK_KNOBS", "Cluster", "LinkClass", "cluster_names", "cluster_text", "load_cluster"),
    "read_cluster",
]

CLUSTERS = Path(__file__).parent / "clusters"

KNOBS = ("compute", "worker link", "NIC", "rack uplink", "wire latency", "software latency", "stragglers", "loader")
"""What `Cluster.changed` can change, and what a prediction may be sensitive to."""
NETWORK_KNOBS = ("worker link", "NIC", "rack uplink", "wire latency", "software latency")

_NOT_TOLD = Quantity(0.0, "unknown")


@dataclass(frozen=True, slots=True)
class LinkClass:
    """One class of links: the rate of one direction and the latency of passing it once."""

    bytes_per_second: Quantity
    latency_seconds: Quantity


@dataclass(frozen=True)
class Cluster:
    """What the planner knows. Optional parts are None when unknown; `num_nodes` 0: as many as wanted.

    rack None: one full-rate fabric. calibration: measured costs of the axes of one grid, used instead of the links.
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
    worker: LinkClass
    nic: LinkClass
    software_latency_seconds: Quantity
    compute: ComputeTable
    num_nodes: int = 0
    nodes_per_rack: int = 0
    rack: LinkClass | None = None
    straggler_deviation: Quantity = field(default=Quantity(0.01, "assumed"))
    jitter_seconds: Quantity = field(default=Quantity(0.0, "assumed"))
    straggler_ratios: tuple[float, ...] = ()
    loader_images_per_second: Quantity | None = None
    initialisation_seconds: Quantity = field(default=_NOT_TOLD)
    first_steps_seconds: Quantity = field(default=_NOT_TOLD)
    price_per_node_hour: Quantity | None = None
    currency: str = ""
    node_mtbf_seconds: Quantity | None = None
    checkpoint_seconds: Quantity = field(default=Quantity(20.0, "assumed"))
    restart_seconds: Quantity = field(default=Quantity(300.0, "assumed"))
    calibration: Calibration | None = field(default=None, compare=False)
    measured_here: bool = False
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
        rack = self.rack
        return Network(
            workers_per_node=self.workers_per_node,
            nodes_per_rack=self.nodes_per_rack if rack else 0,
            worker_rate=self.worker.bytes_per_second.value,
            worker_latency=self.worker.latency_seconds.value,
            nic_rate=self.nic.bytes_per_second.value,
            nic_latency=self.nic.latency_seconds.value,
            rack_rate=rack.bytes_per_second.value if rack else math.inf,
            rack_latency=rack.latency_seconds.value if rack else 0.0,
            software_latency=self.software_latency_seconds.value,
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
        links = [self.worker, self.nic, *([self.rack] if self.rack else [])]
        quantities: dict[str, list[Quantity]] = {
            "worker link": [self.worker.bytes_per_second],
            "NIC": [self.nic.bytes_per_second],
            "rack uplink": [self.rack.bytes_per_second] if self.rack else [],
            "wire latency": [link.latency_seconds for link in links],
            "software latency": [self.software_latency_seconds],
            "stragglers": [self.straggler_deviation, self.jitter_seconds],
            "loader": [self.loader_images_per_second] if self.loader_images_per_second else [],
        }
        return max((one.relative_deviation for one in quantities[knob] if one.value), default=0.0)

    def changed(self, knob: str, factor: float) -> Cluster:
        """The cluster with one thing `factor` times as large: rates for links and the loader, else seconds."""
        if knob == "compute":
            return dataclasses.replace(self, compute=self.compute.times(factor))
        if knob == "worker link":
            return dataclasses.replace(self, worker=_faster(self.worker, factor))
        if knob == "NIC":
            return dataclasses.replace(self, nic=_faster(self.nic, factor))
        if knob == "rack uplink":
            return dataclasses.replace(self, rack=_faster(self.rack, factor) if self.rack else None)
        if knob == "wire latency":
            links = (_slower(self.worker, factor), _slower(self.nic, factor))
            rack = _slower(self.rack, factor) if self.rack else None
            return dataclasses.replace(self, worker=links[0], nic=links[1], rack=rack)
        if knob == "software latency":
            return dataclasses.replace(self, software_latency_seconds=self.software_latency_seconds.times(factor))
        if knob == "stragglers":
            part, jitter = self.straggler_deviation.times(factor), self.jitter_seconds.times(factor)
            ratios = _scattered(self.straggler_ratios, factor)
            return dataclasses.replace(self, straggler_deviation=part, jitter_seconds=jitter, straggler_ratios=ratios)
        assert knob == "loader", knob
        loader = self.loader_images_per_second
        return dataclasses.replace(self, loader_images_per_second=loader.times(factor) if loader else None)


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
    """The cluster that the text of a file describes; `source` names the file in errors.

    Raises:
        ConfigError: a key that is unknown or lacks its unit, or a value that cannot be.
    """
    file = parse_cluster(text, source)
    nic, rack = file.link.nic, file.link.rack
    # What the NICs of a node could send together, before protocols take their part.
    line_rate = nic.rate.by(nic.count_per_node) if nic.count_per_node else nic.rate
    uplinks = None
    if rack is not None:
        over = rack.oversubscription
        rate = rack.rate or (line_rate.times(file.nodes_per_rack).over(over) if over else None)
        assert rate is not None  # `parse_cluster` has seen to it
        uplinks = LinkClass(rate, rack.latency)
    return Cluster(
        name=file.name or source,
        title=file.title,
        accelerator=file.accelerator,
        backend=file.backend,
        collectives=file.software.collectives,
        workers_per_node=file.workers_per_node,
        num_nodes=file.num_nodes,
        nodes_per_rack=file.nodes_per_rack if rack else 0,
        worker=LinkClass(file.link.worker.rate, file.link.worker.latency),
        nic=LinkClass(line_rate.by(nic.efficiency) if nic.efficiency else line_rate, nic.latency),
        rack=uplinks,
        software_latency_seconds=file.software.latency,
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


def _faster(link: LinkClass, factor: float) -> LinkClass:
    return LinkClass(link.bytes_per_second.times(factor), link.latency_seconds)


def _slower(link: LinkClass, factor: float) -> LinkClass:
    return LinkClass(link.bytes_per_second, link.latency_seconds.times(factor))


def _scattered(ratios: tuple[float, ...], factor: float) -> tuple[float, ...]:
    """The same mean, `factor` times as far from it; no time is below 0."""
    if not ratios:
        return ()
    mean = statistics.fmean(ratios)
    return tuple(max(0.0, mean + factor * (one - mean)) for one in ratios)
