"""Measures latency and rate of each axis of a grid at start-up, within about two seconds.

Along every axis a ring all-reduce runs, with the code that training will use, on all lines of the axis at the same
time, so that a network card shared by the ranks of a host shows. A tiny message gives the latency of a step, the same
to all peers at once what further messages cost, a larger one the rate. Where hosts hold several ranks the first line
runs once more alone: how much faster it then is says how many ranks share a link. Times of all ranks are gathered and
the slowest counts, so every rank ends with the same numbers; how often and how large is decided on gathered times
alone, so that no rank runs a message others do not.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from megabatch.comm.allreduce import AllReducer
from megabatch.comm.calibration import AxisCost, Calibration, MeasuredPoint
from megabatch.comm.channel import Channel, Passage
from megabatch.comm.failures import report_lost_peer
from megabatch.comm.grid import ProcessGrid
from megabatch.comm.p2p import PeerLostError, message_tag
from megabatch.comm.phases import Division, Phase
from megabatch.comm.price import UNCUT_BYTES
from megabatch.errors import ConfigError

_TINY_REPEATS = 5
_FIRST_CHUNK_BYTES = 64 * 2**10
_MAX_CHUNK_BYTES = 4 * 2**20
_TELLING = 3
_BACKEND_SIZES = (16 * 2**10, 2**20, 8 * 2**20)


@dataclass(frozen=True, slots=True)
class AxisMeasurement:
    """One axis as measured, line by line: a line is the ranks that share all other coordinates.

    solo_bytes_per_second: the first line without the others, or 0 when not measured. in_memory: whether the ranks of
    the line share memory, by line.
    """

    lines: tuple[tuple[int, ...], ...]
    latency_seconds: tuple[float, ...]
    bytes_per_second: tuple[float, ...]
    message_overhead_seconds: float
    solo_bytes_per_second: float
    in_memory: tuple[bool, ...]

    def cost(self, name: str) -> AxisCost:
        """The cost of the whole axis: its worst line, as phases wait for it."""
        latency, overhead = max(self.latency_seconds), self.message_overhead_seconds
        sharing = max(1.0, self.solo_bytes_per_second / self.bytes_per_second[0])
        rate = min(self.bytes_per_second) * sharing
        return AxisCost(latency, rate, min(overhead, latency), sharing, name=name, size=len(self.lines[0]))


def calibrate(grid: ProcessGrid, *, budget_seconds: float = 2.0) -> Calibration:
    """Measure every axis of `grid` and the backend's own all-reduce; all ranks must call it and get the same.

    budget_seconds: aimed at, not guaranteed: a network on which a single small message takes longer takes longer.

    Raises:
        CommunicationError: a rank died or did not answer in time.
    """
    axes = grid.shape.axes
    share = budget_seconds / (len(axes) + 1)
    measured = {axis: measure_axis(grid, axis, budget_seconds=share) for axis in axes}
    costs = tuple(
        measured[axis].cost(name) if axis in measured else AxisCost(0.0, 1e12, name=name, size=1)
        for axis, name in enumerate(grid.shape.names)
    )
    rate = min((min(measured[axis].bytes_per_second) for axis in axes), default=0.0)
    points = _measure_backend(grid, rate, share) if axes else ()
    return Calibration(
        grid=grid.shape.text,
        num_hosts=len(set(grid.hosts)),
        backend="gloo" if probe_device(grid).type == "cpu" and grid.on_gloo(axes) else "nccl",
        axes=costs,
        points=points,
        versions={"torch": str(torch.__version__)},
    )


def measure_axis(grid: ProcessGrid, axis: int, *, budget_seconds: float = 1.0) -> AxisMeasurement:
    """Latency and rate of every line of an axis, all lines at once; all ranks must call it and get the same."""
    probe = _Probe(grid, axis)
    size = grid.axis_size(axis)
    lines = grid.shape.lines(axis)
    num_steps = 2 * (size - 1)

    (first,) = _by_line(lines, gather(grid, [probe.seconds(1)]))
    repeats = _repeats(0.2 * budget_seconds, max(first), _TINY_REPEATS)
    (tiny,) = _by_line(lines, gather(grid, [probe.seconds(1, repeats)]))
    latency = [min(seconds) / num_steps for seconds in zip(first, tiny, strict=True)]

    own = [probe.seconds(_FIRST_CHUNK_BYTES, repeats), probe.seconds(1, repeats, direct=True)]
    small, direct, in_memory = _by_line(lines, gather(grid, [*own, float(probe.in_memory)]))
    # To all peers at once, in two steps: what the messages beyond the first cost, on cores shared with other ranks. On
    # an axis of two there is no such message.
    overhead = max(0.0, max(direct) / 2 - max(latency)) / (size - 2) if size > 2 else 0.0
    nothing = [num_steps * delay for delay in latency]
    slowest_rate = min(_rates(small, nothing, _FIRST_CHUNK_BYTES, num_steps))
    chunk_bytes = int(slowest_rate * 0.25 * budget_seconds / num_steps)
    chunk_bytes = max(_FIRST_CHUNK_BYTES, min(chunk_bytes, _MAX_CHUNK_BYTES))
    repeats = _repeats(0.4 * budget_seconds, num_steps * (max(latency) + chunk_bytes / slowest_rate), 3)
    (large,) = _by_line(lines, gather(grid, [probe.seconds(chunk_bytes, repeats)]))
    # Beyond the small message, whose fixed costs are those of the large one; beyond none, where both are near.
    tells = chunk_bytes >= _TELLING * _FIRST_CHUNK_BYTES
    more_bytes = chunk_bytes - (_FIRST_CHUNK_BYTES if tells else 0)
    rates = _rates(large, small if tells else nothing, more_bytes, num_steps)

    solo_rate = 0.0
    if (sharing := _ranks_that_may_share(grid, axis)) > 1 and len(lines) > 1:
        alone = [
            probe.seconds(num_bytes, 2 * repeats, takes_part=grid.rank in lines[0])
            for num_bytes in (_FIRST_CHUNK_BYTES, chunk_bytes)
        ]
        solo_small, solo = _by_line(lines, gather(grid, alone))
        (solo_rate,) = _rates(solo[:1], (solo_small if tells else nothing)[:1], more_bytes, num_steps)
        solo_rate = min(solo_rate, sharing * rates[0])
    probe.close()
    return AxisMeasurement(lines, tuple(latency), tuple(rates), overhead, solo_rate, tuple(map(bool, in_memory)))


def race(grid: ProcessGrid, runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of the slowest rank for each run in each round.

    Runs take turns, so that load meets all alike, in an order drawn anew for each round: what ran before decides what
    caches and connections are warm. Every rank draws the same.
    """
    drawn = random.Random(rounds)
    turns = [name for _ in range(rounds) for name in drawn.sample(list(runs), len(runs))]
    own: list[float] = []
    for name in turns:
        _exchange(grid, torch.zeros(1, device=probe_device(grid)))  # all begin at about the same time
        _wait_for_device()
        start = time.perf_counter()
        runs[name]()
        _wait_for_device()
        own.append(time.perf_counter() - start)
    slowest = [max(column) for column in zip(*gather(grid, own), strict=True)]
    return {name: [seconds for turn, seconds in zip(turns, slowest, strict=True) if turn == name] for name in runs}


def gather(grid: ProcessGrid, values: Sequence[float]) -> list[list[float]]:
    """Row r holds what rank r passed; the same table on every rank, in one small hop per axis."""
    table = torch.zeros(grid.world_size, len(values), dtype=torch.float64, device=probe_device(grid))
    table[grid.rank] = torch.tensor(list(values), dtype=torch.float64)
    _exchange(grid, table)
    rows: list[list[float]] = table.tolist()
    return rows


def from_main_rank(grid: ProcessGrid, text: str) -> str:
    """The main rank's text on every rank: the others add zeros to its bytes."""
    (length, *_), *_ = gather(grid, [float(len(text.encode()))])
    numbers = torch.zeros(int(length), device=probe_device(grid))
    if grid.rank == 0:
        numbers += torch.tensor(list(text.encode()), dtype=torch.float32, device=numbers.device)
    _exchange(grid, numbers)
    return bytes(int(number) for number in numbers.tolist()).decode()


def on_main_rank_of(grid: ProcessGrid, work: Callable[[], str]) -> str:
    """What `work` returns on the main rank, which alone does it, on every rank; so is its `ConfigError` raised."""
    text = error = ""
    if grid.rank == 0:
        try:
            text = work()
        except ConfigError as problem:
            error = str(problem)
    if error := from_main_rank(grid, error):
        raise ConfigError(error)
    return from_main_rank(grid, text)


def probe_device(grid: ProcessGrid) -> torch.device:
    """Where gradients will be: the current CUDA device when NCCL serves this grid, else the CPU."""
    axes = grid.shape.axes
    on_cuda = axes and "cuda:nccl" in str(dist.get_backend_config(grid.group(axes[0]))) and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")


class _Probe:
    """Runs a ring all-reduce along one axis."""

    def __init__(self, grid: ProcessGrid, axis: int) -> None:
        self._grid = grid
        self._axis = axis
        self._size = grid.axis_size(axis)
        self._device = probe_device(grid)
        ring, direct = (Phase("all_reduce", "ring", axis, self._size), Phase("all_reduce", "direct", axis, self._size))
        self._name = ring.name(grid.shape.names)
        own = self._device.type == "cpu" and grid.on_gloo([axis])
        self._lanes = grid.memory.claim(2)
        self.in_memory = own and bool(self._lanes) and axis in grid.memory
        self._ring, self._direct = (
            Channel(grid, [(phase, Division())], UNCUT_BYTES, own_primitives=own, lane=lane)
            for phase, lane in zip((ring, direct), self._lanes or (None, None), strict=True)
        )

    def close(self) -> None:
        """Give the lanes back."""
        self._grid.memory.release(self._lanes)

    def seconds(self, chunk_bytes: int, repeats: int = 1, *, direct: bool = False, takes_part: bool = True) -> float:
        """This rank's shortest time for chunks of about `chunk_bytes` (at least one element), or 0 if it stands by."""
        calls = self._grid.next_call(), self._grid.next_call()  # all ranks count them
        if not takes_part:
            return 0.0
        numel = max(1, chunk_bytes // 4) * self._size
        channel = self._direct if direct else self._ring
        try:
            # A tiny one first, so that the ranks of the line begin the next together.
            channel.run(torch.zeros(self._size, device=self._device), message_tag(calls[0], "probe"))
            message = torch.zeros(numel, device=self._device)
            passage = Passage(channel, message, message_tag(calls[1], f"probe {numel}"))
            return min(self._once(passage) for _ in range(repeats))
        except PeerLostError as lost:
            raise report_lost_peer(
                self._grid, lost, task="measuring the network", phase=self._name, call=0, message="probe"
            ) from lost

    def _once(self, passage: Passage) -> float:
        """Seconds of one round, its receives posted before, as those of short messages are."""
        passage.post()
        start = time.perf_counter()
        passage.run()
        _wait_for_device()
        return time.perf_counter() - start


def _measure_backend(grid: ProcessGrid, bytes_per_second: float, budget_seconds: float) -> tuple[MeasuredPoint, ...]:
    """The backend's own all-reduce at rising sizes, until the next would leave the budget; at least one.

    bytes_per_second: of the slowest axis, to foresee how long the next size takes.
    """
    reducer = AllReducer(grid, "backend")
    points: list[MeasuredPoint] = []
    spent = 0.0
    for size in _BACKEND_SIZES:
        # Each byte is sent nearly twice, and there is a run to warm up.
        if points and spent + 2 * (points[-1].seconds + 2 * size / bytes_per_second) > budget_seconds:
            break
        buffer = torch.zeros(size // 4, device=probe_device(grid))
        runs = {"backend": partial(reducer.run, buffer)}
        (warm_up,) = race(grid, runs, 1)["backend"]
        repeats = _repeats(0.2 * budget_seconds, warm_up, 3)
        seconds = race(grid, runs, repeats)["backend"]
        spent += warm_up + sum(seconds)
        points.append(MeasuredPoint("backend", size, statistics.median(seconds)))
    return tuple(points)


def _by_line(lines: Sequence[Sequence[int]], table: Sequence[Sequence[float]]) -> list[list[float]]:
    """For each gathered value, its maximum over the ranks of each line."""
    return [[max(table[rank][value] for rank in line) for line in lines] for value in range(len(table[0]))]


def _rates(seconds: Sequence[float], less: Sequence[float], more_bytes: int, num_steps: int) -> list[float]:
    """Bytes per second of each line: what `more_bytes` per step add to a shorter message - at least a tenth."""
    return [
        num_steps * more_bytes / max(one - shorter, 0.1 * one, 1e-12)
        for one, shorter in zip(seconds, less, strict=True)
    ]


def _repeats(budget_seconds: float, once_seconds: float, most: int) -> int:
    return max(1, min(most, int(budget_seconds / max(once_seconds, 1e-9))))


def _ranks_that_may_share(grid: ProcessGrid, axis: int) -> int:
    """Ranks of one host, if the axis leaves the host: they may share its network card. Unknown hosts: all ranks."""
    if not grid.hosts:
        return grid.world_size
    return max(Counter(grid.hosts).values()) if grid.shape.crosses_hosts(axis, grid.hosts) else 1


def _exchange(grid: ProcessGrid, tensor: torch.Tensor) -> None:
    """Sum a small tensor over the grid in one hop per axis."""
    grid.reducer(partial(AllReducer, grid, "exchange"), "exchange").run(tensor)


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
