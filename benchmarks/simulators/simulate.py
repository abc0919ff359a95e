"""Plays the phases of an all-reduce, and whole steps, event by event: contention, start skew, uneven workers.

The closed form of `cost` assumes that ranks step in unison and that nobody else uses the links. Here a rank begins
its next round when its own sends have left and what it waits for has arrived, transfers share links fairly
(`fluid`), other jobs may be on the network, and ranks may start late. In lock-step (chains: free) and alone on the
network the two agree to 0.1 %; that, and stored results of SimGrid (`simgrid.csv`), keep the arithmetic of both
honest. Neither proves the physics.

    closed form     sum over rounds of latency + bytes / rate of the busiest link
    lock-step       the same rounds, each played once, times their number
    free            every transfer of every rank
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.simulators.fluid import Fluid, Links
from megabatch.comm.phases import Phase, Round, num_channels, phases
from megabatch.comm.price import CHAIN_SEGMENTS
from megabatch.comm.shape import GridShape
from megabatch.errors import ConfigError
from megabatch.plan.cluster import Cluster
from megabatch.plan.network import Network
from megabatch.plan.step import Candidate
from megabatch.plan.workload import Workload, fill_buckets

__all__ = ["Round", "lock_step_seconds", "rounds_of", "simulate_all_reduce", "simulate_steps"]

_MOST_TRANSFERS = 300_000

Array = np.ndarray[Any, np.dtype[np.float64]]


def rounds_of(phase_list: Sequence[Phase], shape: GridShape, chain_segments: int = CHAIN_SEGMENTS) -> list[list[Round]]:
    """The rounds of each channel."""
    channels: list[list[Round]] = [[] for _ in range(num_channels(phase_list))]
    for phase in phase_list:
        channels[phase.channel] += phase.transfers(shape, chain_segments)
    return channels


def lock_step_seconds(network: Network, rounds: Sequence[Round], world_size: int, message_bytes: float) -> float:
    """Seconds when all ranks begin each round together: one round of each kind is played."""
    links = Links(network, world_size)
    capacities = links.capacities
    total = 0.0
    for one in rounds:
        fluid = Fluid(capacities)
        for source, target in one.pairs:
            path, latency = links.path(source, target)
            fluid.start(path, latency, one.share * message_bytes, None)
        total += one.count * fluid.run(lambda _: None)
    return total


def simulate_all_reduce(
    network: Network,
    algorithm: str,
    shape: GridShape,
    message_bytes: float,
    *,
    start_seconds: Sequence[float] = (),
    background: Sequence[tuple[int, int]] = (),
    chain_segments: int = CHAIN_SEGMENTS,
) -> float:
    """Seconds until every rank has the result, each rank going on as soon as it can.

    start_seconds: when each rank begins. background: transfers of other jobs between ranks' nodes that never end.

    Raises:
        ConfigError: more transfers than can be played in reasonable time.
    """
    channels = rounds_of(phases(algorithm, shape), shape, chain_segments)
    world_size = shape.world_size
    transfers = sum(one.count * len(one.pairs) for channel in channels for one in channel)
    if transfers > _MOST_TRANSFERS:
        raise ConfigError(
            f"{algorithm} on grid {shape.text} makes {transfers:,} transfers, at most {_MOST_TRANSFERS:,} are played "
            "one by one; use a smaller grid, or `lock_step_seconds`"
        )
    links = Links(network, world_size)
    fluid = Fluid(links.capacities, [links.path(source, target)[0] for source, target in background])
    players = [
        _Player(fluid, links, channel, world_size, message_bytes, index) for index, channel in enumerate(channels)
    ]
    starts = list(start_seconds) or [0.0] * world_size
    for player in players:
        for rank in range(world_size):
            fluid.at(starts[rank], (player, rank, "start"))

    def arrived(label: tuple[_Player, int, str]) -> None:
        label[0].event(label[1], label[2])

    return max(fluid.run(arrived), max(starts))


def simulate_steps(
    cluster: Cluster, workload: Workload, candidate: Candidate, pass_seconds: float, num_steps: int, seed: int = 0
) -> Array:
    """Seconds of `num_steps` steps in which every worker's compute time is drawn anew.

    A bucket is reduced when the slowest worker has it and the bucket before it is done.
    """
    random = np.random.default_rng(seed)
    scatter = math.hypot(cluster.straggler_deviation.value * pass_seconds, cluster.jitter_seconds.value)
    backward = cluster.compute.backward_share
    buckets = fill_buckets(workload.layers, workload.bytes_per_parameter, candidate.bucket_mb)
    prices = {
        size: cluster.all_reduce(candidate.algorithm, candidate.grid, size).seconds
        for size in {bucket.num_bytes for bucket in buckets}
    }
    times = np.zeros(num_steps)
    for step in range(num_steps):
        slowest = float(np.max(pass_seconds + scatter * random.standard_normal(candidate.workers)))
        end = 0.0
        for bucket in buckets:
            ready = slowest * (1 - backward + backward * bucket.ready)
            end = max(end, ready) + prices[bucket.num_bytes]
        times[step] = max(end, slowest)
    return times


class _Player:
    """One channel: lets each rank begin its next round when its sends have left and its receives are in."""

    def __init__(
        self, fluid: Fluid, links: Links, rounds: Sequence[Round], world_size: int, message_bytes: float, channel: int
    ) -> None:
        self._fluid, self._links, self._bytes, self.channel = fluid, links, message_bytes, channel
        self._rounds = [one for one in rounds for _ in range(one.count)]
        self._sends: list[dict[int, list[int]]] = []
        self._expected: list[dict[int, int]] = []
        made: dict[int, tuple[dict[int, list[int]], dict[int, int]]] = {}
        for one in self._rounds:
            if id(one) not in made:
                sends: dict[int, list[int]] = {}
                expected: dict[int, int] = {}
                for source, target in one.pairs:
                    sends.setdefault(source, []).append(target)
                    expected[target] = expected.get(target, 0) + 1
                made[id(one)] = sends, expected
            self._sends.append(made[id(one)][0])
            self._expected.append(made[id(one)][1])
        self._current = [-1] * world_size
        self._unsent = [0] * world_size
        self._received = [dict[int, int]() for _ in range(world_size)]

    def event(self, rank: int, what: str) -> None:
        """A rank starts, one of its sends has left, or a message of a round has come in ("in 7")."""
        if what == "out":
            self._unsent[rank] -= 1
        elif what.startswith("in "):
            index = int(what[3:])
            self._received[rank][index] = self._received[rank].get(index, 0) + 1
        elif what == "start":
            self._begin(rank, 0)
        self._go_on(rank)

    def _go_on(self, rank: int) -> None:
        while 0 <= (index := self._current[rank]) < len(self._rounds):
            waiting = self._received[rank].get(index, 0) < self._expected[index].get(rank, 0)
            if self._unsent[rank] or waiting:
                return
            self._begin(rank, index + 1)

    def _begin(self, rank: int, index: int) -> None:
        self._current[rank] = index
        if index >= len(self._rounds):
            return
        targets = self._sends[index].get(rank, [])
        self._unsent[rank] = len(targets)
        for target in targets:
            path, latency = self._links.path(rank, target)
            self._fluid.start(
                path, latency, self._rounds[index].share * self._bytes, _Arrival(self, rank, target, index)
            )


class _Arrival(tuple[Any, ...]):
    """A message that has come in: the sender is free again and the receiver has it."""

    __slots__ = ()

    def __new__(cls, player: _Player, source: int, target: int, index: int) -> _Arrival:
        return super().__new__(cls, (_Both(player, source, target, index), 0, ""))


@dataclass(frozen=True, slots=True)
class _Both:
    player: _Player
    source: int
    target: int
    index: int

    def event(self, _rank: int, _what: str) -> None:
        self.player.event(self.target, f"in {self.index}")
        self.player.event(self.source, "out")
