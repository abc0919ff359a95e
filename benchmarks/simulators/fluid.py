"""Transfers that share links, as fluids: at every moment each gets its max-min fair share of the links on its
path.

Links are split duplex: a worker's port, a node's NIC and a rack's uplink each have an outgoing and an incoming
side. Progressive filling: all transfers grow alike until a link is full; those on it stop there, the others go on.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megabatch.plan.network import Network

__all__ = ["Fluid", "Links", "fair_rates"]

_DONE_BYTES = 1e-6

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Links:
    """All links of a world of `world_size`, numbered; `path` says which ones a transfer crosses, and its latency."""

    network: Network
    world_size: int

    @property
    def capacities(self) -> Array:
        """Bytes per second of every link: ports out and in, NICs out and in, uplinks out and in."""
        nodes, racks = self._node(self.world_size - 1) + 1, self._rack(self.world_size - 1) + 1
        net = self.network
        sides = [(self.world_size, net.worker_rate), (nodes, net.nic_rate), (racks, net.rack_rate)]
        return np.concatenate([np.full(2 * count, rate) for count, rate in sides])

    def path(self, source: int, target: int) -> tuple[tuple[int, ...], float]:
        """Numbers of the links from one rank to another, and the latency with the software's."""
        net = self.network
        links = [2 * source, 2 * target + 1]
        latency = net.software_latency + 2 * net.worker_latency
        one, other = self._node(source), self._node(target)
        if one != other:
            first = 2 * self.world_size
            links += [first + 2 * one, first + 2 * other + 1]
            latency += 2 * net.nic_latency
            if self._rack(source) != self._rack(target):
                first += 2 * (self._node(self.world_size - 1) + 1)
                links += [first + 2 * self._rack(source), first + 2 * self._rack(target) + 1]
                latency += 2 * net.rack_latency
        return tuple(links), latency

    def _node(self, rank: int) -> int:
        return rank // self.network.workers_per_node

    def _rack(self, rank: int) -> int:
        per_rack = self.network.nodes_per_rack * self.network.workers_per_node
        return rank // per_rack if per_rack else 0


class Fluid:
    """Plays transfers through links. `start` one, `run` until nothing moves; `arrived` is called as each arrives."""

    def __init__(self, capacities: Array, background: Iterable[Sequence[int]] = ()) -> None:
        self.now = 0.0
        self._capacities = capacities
        self._background = [tuple(path) for path in background]
        self._waiting: list[tuple[float, int, tuple[int, ...], float, Any]] = []
        self._paths: list[tuple[int, ...]] = []
        self._left: list[float] = []
        self._labels: list[Any] = []
        self._count = 0

    def start(self, path: Sequence[int], latency: float, num_bytes: float, label: Any) -> None:
        """Begin a transfer now; its bytes flow after the latency."""
        self._count += 1
        heapq.heappush(self._waiting, (self.now + latency, self._count, tuple(path), num_bytes, label))

    def at(self, moment: float, label: Any) -> None:
        """Call `arrived(label)` at a moment, without any bytes."""
        self._count += 1
        heapq.heappush(self._waiting, (moment, self._count, (), 0.0, label))

    def run(self, arrived: Callable[[Any], None]) -> float:
        """Play to the end; returns the time of the last arrival."""
        last = self.now
        while self._waiting or self._paths:
            rates = fair_rates([*self._paths, *self._background], self._capacities)[: len(self._paths)]
            left = np.array(self._left)
            finish = float(np.min(left / rates)) if self._paths else np.inf
            wake = self._waiting[0][0] - self.now if self._waiting else np.inf
            step = max(0.0, min(finish, wake))
            self.now += step
            left = left - rates * step
            done = [
                index for index in range(len(left)) if left[index] <= _DONE_BYTES or left[index] / rates[index] < 1e-15
            ]
            labels = [self._labels[index] for index in done]
            keep = [index for index in range(len(left)) if index not in set(done)]
            self._paths = [self._paths[index] for index in keep]
            self._labels = [self._labels[index] for index in keep]
            self._left = [float(left[index]) for index in keep]
            while self._waiting and self._waiting[0][0] <= self.now + 1e-15:
                _, _, path, num_bytes, label = heapq.heappop(self._waiting)
                if path:
                    self._paths.append(path)
                    self._left.append(num_bytes)
                    self._labels.append(label)
                else:
                    labels.append(label)
            for label in labels:
                last = self.now
                arrived(label)
        return last


def fair_rates(paths: Sequence[Sequence[int]], capacities: Array) -> Array:
    """Max-min fair rate of each path over links of given capacity."""
    if not paths:
        return np.zeros(0)
    flow = np.repeat(np.arange(len(paths)), [len(path) for path in paths])
    link = np.concatenate([np.asarray(path, dtype=np.int64) for path in paths])
    used, link = np.unique(link, return_inverse=True)
    room = capacities[used].astype(np.float64)
    rates = np.zeros(len(paths))
    moving = np.ones(len(paths), dtype=bool)
    while moving.any():
        active = moving[flow]
        load = np.bincount(link[active], minlength=len(used))
        share = np.where(load > 0, room / np.maximum(load, 1), np.inf)
        grow = float(share.min())
        rates[moving] += grow
        room = room - grow * load
        full = (share <= grow * (1 + 1e-12)) & (load > 0)
        moving[flow[active & full[link]]] = False
    return rates
