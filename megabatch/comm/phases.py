"""Every all-reduce algorithm as plain data: a tuple of phases. Imports no torch.

A phase is expanded here and nowhere else: `Phase.steps` counts its steps for the price, `Phase.transfers` says who
sends how much to whom, for simulations, drawings and the tests of what is executed.

The 2D torus is Mikami 2018 (arXiv 1811.05233, section 3): reduce-scatter along the row, all-reduce along the
column, all-gather along the row. Worked example, grid 2x2, 8 elements, each rank starting with its own 8:

    phase                share   steps   rank 0 then holds
    row reduce-scatter   1       1       elements 0-3 summed over ranks 0 1
    column all-reduce    1/2     2       elements 0-3 summed over ranks 0 1 2 3
    row all-gather       1       1       elements 0-7 summed over ranks 0 1 2 3

Beyond the paper: any number of axes (the middle phase is again a torus), a two-way torus whose halves cross
the axes in opposite order at the same time, and `direct` / `exchange`, which reach every peer of an axis in a
single hop. The torus itself takes the form that suits the message (`torus_form`): short ones go in one hop per
phase, as many messages and bytes as round a ring but fewer that wait for one another; long ones, where rows and
columns are different links, in several parts, so that one crosses the columns while the next crosses the rows.

Steps count *dependent* messages, so 2(X-1) + 2(Y-1) for the torus; the paper quotes 2(X-1), leaving out the
column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from megabatch.comm.shape import GridShape
from megabatch.errors import ConfigError, nearest

Operation = Literal["reduce_scatter", "all_reduce", "all_gather", "reduce", "broadcast", "exchange"]
"""`exchange`: every rank sends its whole share to all peers of the axis and sums what arrives."""

Pattern = Literal["ring", "direct", "halving", "chain", "backend"]
"""How messages travel: to the next rank round a ring, to all peers at once, to a partner at half the former distance,
along a line without return, or as the backend's own all-reduce sees fit (priced and drawn as a ring)."""

WORLD = -1
"""Axis of a phase that runs over all ranks at once, ignoring the grid."""

SHORT_MESSAGE_BYTES = 256 * 1024
"""Up to here latency and the cost of a message count, not bytes."""

_CHANNEL_BYTES = 4 * 2**20
MAX_TORUS_CHANNELS = 4


@dataclass(frozen=True, slots=True)
class RoundGroup:
    """`count` equal steps in a row: in each, a sending rank starts `peers` transfers of `share` of the message.

    `distance` is how far along the axis a transfer goes (for `peers` > 1: to each of the other positions).
    """

    count: int
    share: Fraction
    peers: int = 1
    distance: int = 1


@dataclass(frozen=True, slots=True)
class Round:
    """`count` equal rounds in a row: in each, every (source, target) of `pairs` carries `share` of the message."""

    pairs: tuple[tuple[int, int], ...]
    share: float
    count: int = 1


@dataclass(frozen=True, slots=True)
class Phase:
    """One collective operation along one axis.

    share: part of the whole message that a rank holds on entry (all_gather: on exit).
    channel: phases of different channels run at the same time; inside a channel each waits for the one before.
    leaders: only ranks at position 0 of every faster axis take part.
    """

    operation: Operation
    pattern: Pattern
    axis: int
    size: int
    share: Fraction = Fraction(1)
    channel: int = 0
    leaders: bool = False

    def name(self, axis_names: Sequence[str]) -> str:
        """What people call it: "row reduce-scatter"."""
        axis = "world" if self.axis == WORLD else axis_names[self.axis]
        return f"{axis} {self.operation.replace('_', '-')}"

    @property
    def reduces(self) -> bool:
        """Whether contributions of different ranks are summed here."""
        return self.operation not in ("all_gather", "broadcast")

    def steps(self) -> tuple[RoundGroup, ...]:
        """The dependent steps, runs of equal ones joined."""
        once = 2 if self.operation == "all_reduce" else 1
        if self.operation == "exchange":
            return (RoundGroup(1, self.share, self.size - 1),)
        if self.pattern == "direct":
            return (RoundGroup(once, self.share / self.size, self.size - 1),)
        if self.pattern == "chain":
            return (RoundGroup(self.size - 1, self.share),)
        if self.pattern == "halving":
            return _halving_steps(self.size, self.share)
        return (RoundGroup(once * (self.size - 1), self.share / self.size),)

    @property
    def num_steps(self) -> int:
        """Messages that must follow one another: what latency is multiplied with."""
        return sum(step.count for step in self.steps())

    def transfers(self, shape: GridShape, segments: int = 1) -> tuple[Round, ...]:
        """Every round in order, with the global ranks that send and receive; all lines of the axis go together.

        segments: pieces in which a chain moves its part, each one hop behind the piece before it.
        """
        lines = ((*range(shape.world_size),),) if self.axis == WORLD else shape.lines(self.axis)
        if self.leaders:
            lines = tuple(line for line in lines if not any(shape.coordinates(line[0])[self.axis + 1 :]))
        assert all(len(line) == self.size for line in lines), f"a phase over {self.size} ranks in grid {shape.text}"
        return tuple(
            Round(tuple((line[a], line[b]) for line in lines for a, b in one.pairs), one.share, one.count)
            for one in self._line_rounds(segments)
        )

    def _line_rounds(self, segments: int) -> Iterator[Round]:
        """The rounds along one line, whose ranks are named by their position."""
        if self.pattern == "chain":
            hops = [(position, position + 1) for position in range(self.size - 1)]
            if self.operation == "reduce":
                hops = [(target, source) for source, target in reversed(hops)]
            for number in range(len(hops) + segments - 1):
                moving = tuple(hop for index, hop in enumerate(hops) if 0 <= number - index < segments)
                yield Round(moving, float(self.share) / segments)
            return
        everyone = range(self.size)
        core, extra = halving_core(self.size)
        inside = [*range(0, 2 * extra, 2), *range(2 * extra, self.size)]
        steps = self.steps()
        for index, step in enumerate(steps):
            if self.pattern == "direct":
                pairs = [(a, b) for a in everyone for b in everyone if a != b]
            elif self.pattern != "halving":
                pairs = [(a, (a + 1) % self.size) for a in everyone]
            elif extra and index in (0, len(steps) - 1):
                pairs = [(2 * pair + (index == 0), 2 * pair + (index > 0)) for pair in range(extra)]
            else:
                pairs = [(inside[place], inside[place ^ step.distance]) for place in range(core)]
            yield Round(tuple(pairs), float(step.share), step.count)

    def sent_share(self, position: int | None = None) -> Fraction:
        """Part of the message that the rank at `position` of the axis sends; by default, the busiest."""
        if position is None:
            # Position 0 heads a broadcast and folds in a halving; position 1 sends in a reduce.
            return max(self.sent_share(0), self.sent_share(min(1, self.size - 1)))
        if self.pattern == "chain":
            silent = 0 if self.operation == "reduce" else self.size - 1
            return Fraction(0) if position == silent else self.share
        if self.pattern == "halving":
            core, extra = halving_core(self.size)
            if position < 2 * extra and position % 2 == 1:
                return self.share
            unfold = self.share if position < 2 * extra else 0
            return 2 * self.share * Fraction(core - 1, core) + unfold
        return sum((step.count * step.peers * step.share for step in self.steps()), Fraction(0))


def phases(
    algorithm: str,
    shape: GridShape | Sequence[int],
    message_bytes: float | None = None,
    *,
    separate_links: bool = False,
) -> tuple[Phase, ...]:
    """The phases of an algorithm on a grid; axes of one rank need none, so a lone rank gets none at all.

    With `message_bytes`, as our own primitives run it for such a message; without, as the paper has it.
    separate_links: rows stay inside hosts, so that rows and columns can be busy at the same time.
    """
    if algorithm not in ALGORITHMS:
        known = ", ".join(ALGORITHMS)
        hint = nearest(algorithm, ALGORITHMS)
        raise ConfigError(f"all-reduce algorithm '{algorithm}' is unknown; choose one of {known}{hint}")
    grid = shape if isinstance(shape, GridShape) else GridShape(tuple(shape))
    if grid.world_size == 1:
        return ()
    if algorithm == "torus" and message_bytes is not None:
        axes = grid.axes[::-1]
        pattern, channels = torus_form(message_bytes, separate_links=separate_links and len(axes) > 1)
        parts = [
            torus_phases(grid, axes, pattern=pattern, share=Fraction(1, channels), channel=channel)
            for channel in range(channels)
        ]
        return tuple(phase for part in parts for phase in part)
    return ALGORITHMS[algorithm](grid)


def torus_form(message_bytes: float, *, separate_links: bool) -> tuple[Pattern, int]:
    """(pattern, channels) of the torus for a message: one hop per phase, rings, or rings for several parts at once."""
    if message_bytes <= SHORT_MESSAGE_BYTES:
        return "direct", 1
    return "ring", max(1, min(int(message_bytes // _CHANNEL_BYTES), MAX_TORUS_CHANNELS)) if separate_links else 1


def torus_phases(
    grid: GridShape, axes: Sequence[int], *, pattern: Pattern = "ring", share: Fraction = Fraction(1), channel: int = 0
) -> tuple[Phase, ...]:
    """A torus over `axes` in this order: reduce-scatter inwards, all-reduce on the last, gather outwards."""
    *outer, last = axes
    inwards: list[Phase] = []
    outwards: list[Phase] = []
    for axis in outer:
        size = grid.sizes[axis]
        inwards.append(Phase("reduce_scatter", pattern, axis, size, share, channel))
        outwards.insert(0, Phase("all_gather", pattern, axis, size, share, channel))
        share /= size
    return (*inwards, Phase("all_reduce", pattern, last, grid.sizes[last], share, channel), *outwards)


def num_channels(phase_list: Sequence[Phase]) -> int:
    """How many parts of the message travel at the same time, one per channel; parts are equal."""
    return max((phase.channel for phase in phase_list), default=0) + 1


def equal_parts(phase_list: Sequence[Phase]) -> int:
    """What the length of a message must divide by for the backend's own collectives: they scatter equal chunks.

    An all-reduce takes any length, so on a grid of rows and columns a torus needs equal parts along its row alone.
    """
    channels = range(num_channels(phase_list))
    scattered = [
        math.prod(one.size for one in phase_list if one.channel == number and one.operation == "reduce_scatter")
        for number in channels
    ]
    return len(channels) * math.lcm(*scattered)


def staggered(phase_list: Sequence[Phase]) -> bool:
    """Whether several channels begin on the same axis: then they cross it one after another."""
    firsts = {phase.channel: phase.axis for phase in reversed(phase_list)}
    return len(firsts) > 1 and len(set(firsts.values())) == 1


def num_steps(phase_list: Sequence[Phase]) -> int:
    """Dependent messages of the whole algorithm: the longest channel."""
    channels = [0] * num_channels(phase_list)
    for phase in phase_list:
        channels[phase.channel] += phase.num_steps
    return max(channels)


def halving_core(size: int) -> tuple[int, int]:
    """(core, extra): the largest power of two not above `size`, and the ranks left over.

    The first 2 * extra positions pair up (2i, 2i + 1): the odd one hands its data to the even one and waits
    for the result, as in Rabenseifner's algorithm for other than powers of two.
    """
    core = 1 << (size.bit_length() - 1)
    return core, size - core


@dataclass(frozen=True, slots=True)
class Division:
    """Divisors around one phase: of a rank's contribution before it, of the result after it; 1 means none."""

    before: float = 1
    after: float = 1


def divisions(phase_list: Sequence[Phase], *, half_precision: bool) -> tuple[Division, ...]:
    """Divisors for each phase that together turn the sum over the world into the average.

    In float32 and float64 the sum is divided once, at the end, by the rank that owns each element.

    Float16 ends at 65504 and loses what is below 6e-8. Summing 4096 gradients first overflows; dividing each by 4096
    first underflows. A torus offers a natural split: divide by X before the row phase and by Y before the column phase,
    so no value on the wire is larger than the largest gradient, and none is divided by more than one axis at a time.
    Algorithms that cross the world in one phase divide by about the square root of its size before and by the rest
    after, as apex and FSDP do; they overflow when gradients exceed 65504 / sqrt(ranks), the torus never. Bfloat16 has
    the range of float32 but takes the same path.
    """
    if half_precision:
        return tuple(_split(phase) for phase in phase_list)
    reducing = [phase for phase in phase_list if phase.reduces]
    last_of_channel = {phase.channel: phase for phase in reducing}
    size_of_channel = {
        channel: math.prod(phase.size for phase in reducing if phase.channel == channel) for channel in last_of_channel
    }
    return tuple(
        Division(after=size_of_channel[phase.channel]) if phase is last_of_channel.get(phase.channel) else Division()
        for phase in phase_list
    )


def _split(phase: Phase) -> Division:
    if not phase.reduces:
        return Division()
    if phase.axis != WORLD:
        return Division(before=phase.size)
    before = 2 ** round(math.log2(phase.size) / 2)  # a power of two divides without rounding
    return Division(before, phase.size / before)


def _halving_steps(size: int, share: Fraction) -> tuple[RoundGroup, ...]:
    core, extra = halving_core(size)
    distances = [core >> depth for depth in range(1, core.bit_length())]
    halvings = [RoundGroup(1, share / (core // distance), distance=distance) for distance in distances]
    fold = [RoundGroup(1, share)] if extra else []
    return (*fold, *halvings, *reversed(halvings), *fold)


def _flat(pattern: Pattern) -> Callable[[GridShape], tuple[Phase, ...]]:
    return lambda grid: (Phase("all_reduce", pattern, WORLD, grid.world_size),)


def _torus(pattern: Pattern) -> Callable[[GridShape], tuple[Phase, ...]]:
    return lambda grid: torus_phases(grid, grid.axes[::-1], pattern=pattern)


def _two_way_torus(grid: GridShape) -> tuple[Phase, ...]:
    """One channel per axis, each starting on another axis, so that every axis is busy all the time."""
    axes = grid.axes[::-1]
    channels: list[Phase] = []
    for channel in range(len(axes)):
        order = axes[channel:] + axes[:channel]
        channels += torus_phases(grid, order, share=Fraction(1, len(axes)), channel=channel)
    return tuple(channels)


def _hierarchical(grid: GridShape) -> tuple[Phase, ...]:
    """Reduce to a leader on each faster axis, all-reduce the leaders, broadcast (Jia 2018, 1807.11205)."""
    *outer, last = grid.axes[::-1]
    inwards = [Phase("reduce", "chain", axis, grid.sizes[axis], leaders=depth > 0) for depth, axis in enumerate(outer)]
    outwards = [
        Phase("broadcast", "chain", phase.axis, phase.size, leaders=phase.leaders) for phase in reversed(inwards)
    ]
    middle = Phase("all_reduce", "ring", last, grid.sizes[last], leaders=bool(outer))
    return (*inwards, middle, *outwards)


def _exchange(grid: GridShape) -> tuple[Phase, ...]:
    return tuple(Phase("exchange", "direct", axis, grid.sizes[axis]) for axis in grid.axes[::-1])


ALGORITHMS: dict[str, Callable[[GridShape], tuple[Phase, ...]]] = {
    "ring": _flat("ring"),
    "halving_doubling": _flat("halving"),
    "hierarchical": _hierarchical,
    "torus": _torus("ring"),
    "two_way_torus": _two_way_torus,
    "direct": _torus("direct"),
    "exchange": _exchange,
    "backend": _flat("backend"),
}
"""Name -> phases on a grid. `backend` is torch.distributed's own all-reduce, the one plain DDP uses."""

LIBRARY_ALGORITHMS = ("torus", "hierarchical", "backend")
"""On a backend with its own collectives the others would only be sends and receives in Python."""
