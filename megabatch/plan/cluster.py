"""A cluster as the planner sees it: nodes of workers, three classes of links, step times, prices, failures.

    worker --port-- node --NIC-- rack switch --uplink-- the other racks

Files are TOML with units in the key names; see `megabatch/plan/clusters` and docs/planning.md. Bits and bytes are
told apart at this edge and nowhere else: inside, everything is bytes and seconds.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megabatch.comm.calibration import Calibration
from megabatch.errors import ConfigError, nearest
from megabatch.plan.compute import ComputeTable, read_compute
from megabatch.plan.quantity import Quantity, read_quantity

__all__ = ["KNOBS", "Cluster", "Link", "Network", "cluster_names", "load_cluster", "read_cluster"]

CLUSTERS = Path(__file__).parent / "clusters"

KNOBS = ("compute", "worker link", "NIC", "rack uplink", "wire latency", "software latency", "stragglers", "loader")
"""What `Cluster.changed` can change, and what a prediction may be sensitive to."""

_RATES = {"gigabits_per_second": 1e9 / 8, "gigabytes_per_second": 1e9, "bytes_per_second": 1.0}
_TIMES = {"microseconds": 1e-6, "milliseconds": 1e-3, "seconds": 1.0, "hours": 3600.0}
_SECTIONS = {
    "": ("name", "title", "accelerator", "backend", "num_nodes", "workers_per_node", "nodes_per_rack", "measured_here"),
    "link.worker": ("latency", "rate"),
    "link.nic": ("latency", "rate", "count_per_node", "efficiency"),
    "link.rack": ("latency", "rate", "oversubscription"),
    "software": ("latency", "collectives"),
    "straggler": ("relative_deviation", "deviation", "measured_ratios"),
    "loader": ("images_per_second_per_node",),
    "start": ("initialisation", "first_updates"),
    "price": ("per_node_hour", "currency"),
    "failures": ("node_mtbf", "checkpoint", "restart"),
}


@dataclass(frozen=True, slots=True)
class Link:
    """One class of links: the rate of one direction and the latency of passing it once."""

    bytes_per_second: Quantity
    latency_seconds: Quantity


@dataclass(frozen=True, slots=True)
class Network:
    """The links alone, bytes per second and seconds: what the price of an all-reduce depends on.

    collectives: what the backend's own all-reduce is taken for, "ring" or "tree". nodes_per_rack 0: one fabric.
    """

    workers_per_node: int
    nodes_per_rack: int
    worker_rate: float
    worker_latency: float
    nic_rate: float
    nic_latency: float
    rack_rate: float
    rack_latency: float
    software_latency: float
    collectives: str


@dataclass(frozen=True)
class Cluster:
    """What the planner knows. Optional parts are None when unknown; `num_nodes` 0: as many as wanted.

    rack None: one full-rate fabric. calibration: measured costs of the axes of one grid, used instead of the links.
    A worker's step scatters by `straggler_deviation` of its compute and by `jitter_seconds` whatever it computes.
    straggler_ratios: measured step times over their median, which replace that law where there are any.
    first_updates_seconds: time lost once, while caches fill and kernels are chosen.
    """

    name: str
    title: str
    accelerator: str
    backend: str
    collectives: str
    workers_per_node: int
    worker: Link
    nic: Link
    software_latency_seconds: Quantity
    compute: ComputeTable
    num_nodes: int = 0
    nodes_per_rack: int = 0
    rack: Link | None = None
    straggler_deviation: Quantity = field(default=Quantity(0.01, "assumed"))
    jitter_seconds: Quantity = field(default=Quantity(0.0, "assumed"))
    straggler_ratios: tuple[float, ...] = ()
    loader_images_per_second: Quantity | None = None
    initialisation_seconds: Quantity = field(default=Quantity(0.0, "unknown"))
    first_updates_seconds: Quantity = field(default=Quantity(0.0, "unknown"))
    price_per_node_hour: Quantity | None = None
    currency: str = ""
    node_mtbf_seconds: Quantity | None = None
    checkpoint_seconds: Quantity = field(default=Quantity(20.0, "assumed"))
    restart_seconds: Quantity = field(default=Quantity(300.0, "assumed"))
    calibration: Calibration | None = field(default=None, compare=False)

    @property
    def max_workers(self) -> float:
        """How many workers the cluster holds; infinite when the file does not say."""
        return self.num_nodes * self.workers_per_node if self.num_nodes else math.inf

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

    def check_holds(self, num_workers: int) -> None:
        """Raise `ConfigError` when the workers do not fit."""
        if num_workers < 1:
            raise ConfigError(f"{num_workers} workers asked for; give at least 1")
        if num_workers > self.max_workers:
            raise ConfigError(
                f"{num_workers:,} workers asked for but cluster '{self.name}' holds {self.max_workers:,} "
                f"({self.num_nodes:,} nodes x {self.workers_per_node}); ask for fewer, or describe a larger cluster"
            )

    def deviation(self, knob: str) -> float:
        """Relative standard deviation of what a knob turns."""
        latencies = [self.worker.latency_seconds, self.nic.latency_seconds]
        latencies += [self.rack.latency_seconds] if self.rack else []
        quantities: dict[str, list[Quantity]] = {
            "worker link": [self.worker.bytes_per_second],
            "NIC": [self.nic.bytes_per_second],
            "rack uplink": [self.rack.bytes_per_second] if self.rack else [],
            "wire latency": latencies,
            "software latency": [self.software_latency_seconds],
            "stragglers": [self.straggler_deviation],
            "loader": [self.loader_images_per_second] if self.loader_images_per_second else [],
        }
        if knob == "compute":
            return self.compute.relative_deviation
        return max((quantity.relative_deviation for quantity in quantities[knob]), default=0.0)

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
            return dataclasses.replace(self, straggler_deviation=part, jitter_seconds=jitter)
        assert knob == "loader", knob
        loader = self.loader_images_per_second
        return dataclasses.replace(self, loader_images_per_second=loader.times(factor) if loader else None)


def cluster_names() -> list[str]:
    """The clusters that come with the package."""
    return sorted(path.stem for path in CLUSTERS.glob("*.toml"))


def load_cluster(name: str) -> Cluster:
    """Read a shipped cluster by name, or a TOML file."""
    path = Path(name) if name.endswith(".toml") else CLUSTERS / f"{name}.toml"
    if not name.endswith(".toml") and name not in cluster_names():
        hint = nearest(name, cluster_names()) or f"; known: {', '.join(cluster_names())}"
        raise ConfigError(f"unknown cluster '{name}'{hint}; or give a TOML file, see docs/planning.md")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise ConfigError(f"cluster file '{name}' cannot be read ({reason}); give a TOML file") from None
    return read_cluster(text, f"cluster file '{path.name}'")


def read_cluster(text: str, source: str) -> Cluster:
    """Read the text of a cluster file; `source` names it in errors.

    Raises:
        ConfigError: a key that is unknown or lacks its unit, or a value that cannot be.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}; mend that line") from None
    reader = _Reader(table, source)
    # The step times of this very machine are not in the file: they come from a measurement.
    compute = ComputeTable("", ()) if table.get("measured_here") else read_compute(table.get("compute"), source)
    has_racks = "rack" in table.get("link", {})
    per_node = reader.count("", "workers_per_node")
    nodes_per_rack = reader.count("", "nodes_per_rack") if has_racks else 0
    nic = reader.nic()
    reader.refuse_unknown()
    return Cluster(
        name=str(table.get("name", source)),
        title=str(table.get("title", "")),
        accelerator=str(table.get("accelerator", "")),
        backend=reader.choice("", "backend", ("nccl", "gloo"), "nccl"),
        collectives=reader.choice("software", "collectives", ("ring", "tree"), "ring"),
        workers_per_node=per_node,
        num_nodes=reader.count("", "num_nodes", optional=True),
        nodes_per_rack=nodes_per_rack,
        worker=Link(reader.rate("link.worker"), reader.time("link.worker", "latency")),
        nic=nic,
        rack=reader.rack(nic, nodes_per_rack) if has_racks else None,
        software_latency_seconds=reader.time("software", "latency"),
        compute=compute,
        straggler_deviation=reader.number("straggler", "relative_deviation") or Quantity(0.01, "assumed"),
        jitter_seconds=reader.maybe_time("straggler", "deviation") or Quantity(0.0, "assumed"),
        straggler_ratios=reader.numbers("straggler", "measured_ratios"),
        loader_images_per_second=reader.number("loader", "images_per_second_per_node"),
        initialisation_seconds=reader.maybe_time("start", "initialisation") or Quantity(0.0, "unknown"),
        first_updates_seconds=reader.maybe_time("start", "first_updates") or Quantity(0.0, "unknown"),
        price_per_node_hour=reader.number("price", "per_node_hour"),
        currency=str(table.get("price", {}).get("currency", "")),
        node_mtbf_seconds=reader.maybe_time("failures", "node_mtbf"),
        checkpoint_seconds=reader.maybe_time("failures", "checkpoint") or Quantity(20.0, "assumed"),
        restart_seconds=reader.maybe_time("failures", "restart") or Quantity(300.0, "assumed"),
    )


class _Reader:
    """Looks values up by section and stem (`latency`), whatever their unit, and knows which keys exist."""

    def __init__(self, table: Mapping[str, Any], source: str) -> None:
        self._table, self._source = table, source

    def section(self, name: str) -> Mapping[str, Any]:
        node: Any = self._table
        for part in name.split(".") if name else []:
            node = node.get(part, {}) if isinstance(node, Mapping) else {}
        if not isinstance(node, Mapping):
            raise ConfigError(f"[{name}] of {self._source} is no table; write its keys below a [{name}] line")
        return node

    def count(self, section: str, key: str, *, optional: bool = False) -> int:
        value = self.section(section).get(key, 0 if optional else None)
        if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and not (optional and value == 0)):
            raise ConfigError(f"{key} of {self._source} is {value!r}; give a whole number of at least 1")
        return value

    def choice(self, section: str, key: str, known: tuple[str, ...], default: str) -> str:
        value = str(self.section(section).get(key, default))
        if value not in known:
            raise ConfigError(f"{key} of {self._source} is '{value}'; choose one of {', '.join(known)}")
        return value

    def number(self, section: str, key: str) -> Quantity | None:
        entry = self.section(section).get(key)
        return None if entry is None else read_quantity(entry, f"{section}.{key} of {self._source}")

    def numbers(self, section: str, key: str) -> tuple[float, ...]:
        where = f"{section}.{key} of {self._source}"
        entry = self.section(section).get(key, [])
        if not isinstance(entry, list) or len(entry) == 1:
            raise ConfigError(f"{where} is {entry!r}; give a list of at least 2 numbers")
        return tuple(read_quantity(one, where).value for one in entry)

    def time(self, section: str, stem: str) -> Quantity:
        found = self._with_unit(section, stem, _time_keys(stem), optional=False)
        assert found is not None
        return found

    def maybe_time(self, section: str, stem: str) -> Quantity | None:
        return self._with_unit(section, stem, _time_keys(stem), optional=True)

    def rate(self, section: str) -> Quantity:
        found = self._with_unit(section, "rate", _RATES, optional=False)
        assert found is not None
        return found

    def nic(self) -> Link:
        """All NICs of a node as one link, as the ranks of a node share them evenly."""
        rate = self.rate("link.nic")
        count = self.number("link.nic", "count_per_node") or Quantity(1.0)
        efficiency = self.number("link.nic", "efficiency") or Quantity(1.0)
        if efficiency.value > 1:
            raise ConfigError(f"link.nic.efficiency of {self._source} is {efficiency.value:g}; give 1 or less")
        return Link(rate.times(count.value * efficiency.value), self.time("link.nic", "latency"))

    def rack(self, nic: Link, nodes_per_rack: int) -> Link:
        """The uplinks of one rack as one link: given, or what its NICs could send over the oversubscription."""
        latency = self.time("link.rack", "latency")
        over = self.number("link.rack", "oversubscription")
        if over is None:
            return Link(self.rate("link.rack"), latency)
        if over.value < 1:
            raise ConfigError(f"link.rack.oversubscription of {self._source} is {over.value:g}; give 1 or more")
        count = (self.number("link.nic", "count_per_node") or Quantity(1.0)).value
        raw = self.rate("link.nic").value * count * nodes_per_rack / over.value
        return Link(Quantity(raw, over.certainty, over.source), latency)

    def refuse_unknown(self) -> None:
        for name, stems in _SECTIONS.items():
            for key, value in self.section(name).items():
                if name == "" and isinstance(value, Mapping) and key in ("link", "compute", *_SECTIONS):
                    continue
                if key not in _allowed(stems):
                    self._complain(name, key, stems)
        for key in self.section("link"):
            if f"link.{key}" not in _SECTIONS:
                raise ConfigError(f"[link.{key}] of {self._source} is unknown; links are worker, nic, rack")

    def _with_unit(self, section: str, stem: str, units: Mapping[str, float], optional: bool) -> Quantity | None:
        table = self.section(section)
        present = [key for key in units if key in table]
        if len(present) > 1:
            raise ConfigError(f"[{section}] of {self._source} has both {' and '.join(present)}; give one of them")
        if not present:
            if stem in table:
                self._complain(section, stem, (stem,))
            if optional:
                return None
            raise ConfigError(f"[{section}] of {self._source} lacks its {stem}; give one of {', '.join(units)}")
        where = f"{section}.{present[0]} of {self._source}"
        return read_quantity(table[present[0]], where, zero_allowed=stem != "rate").times(units[present[0]])

    def _complain(self, section: str, key: str, stems: tuple[str, ...]) -> None:
        allowed = _allowed(stems)
        where = f"[{section}] of {self._source}" if section else self._source
        if key in ("rate", "bandwidth", "latency", "speed") or key in stems:
            units = [name for name in allowed if name in _RATES or name.startswith(f"{key}_")]
            raise ConfigError(f"'{key}' in {where} has no unit; write {' or '.join(units or allowed)}")
        raise ConfigError(f"unknown key '{key}' in {where}{nearest(key, allowed) or '; known: ' + ', '.join(allowed)}")


def _time_keys(stem: str) -> dict[str, float]:
    return {f"{stem}_{unit}": factor for unit, factor in _TIMES.items()}


def _allowed(stems: tuple[str, ...]) -> list[str]:
    names: list[str] = []
    timed = ("latency", "deviation", "initialisation", "first_updates", "node_mtbf", "checkpoint", "restart")
    for stem in stems:
        names += list(_RATES) if stem == "rate" else [f"{stem}_{unit}" for unit in _TIMES] if stem in timed else [stem]
    return names


def _faster(link: Link, factor: float) -> Link:
    return Link(link.bytes_per_second.times(factor), link.latency_seconds)


def _slower(link: Link, factor: float) -> Link:
    return Link(link.bytes_per_second, link.latency_seconds.times(factor))
