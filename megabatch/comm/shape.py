"""The arithmetic of a process grid: ranks laid out row by row over two or more axes. Imports no torch.

A grid "2x4" has 2 rows of 4 ranks. Ranks count along the rows, so consecutive ranks - those a launcher puts
on one host - form a row. The last axis is therefore the fast one; Mikami 2018 (arXiv 1811.05233, section 3)
calls it horizontal and the first one vertical.

    axis 1 "row" ->         rank 6 = row 1, column 2
    0  1  2  3              its row    (moves along axis 1): 4 5 6 7
    4  5  6  7              its column (moves along axis 0): 2 6
    axis 0 "column" goes down

More axes follow the same rule: "2x4x8" is 2 racks of 4 hosts of 8 ranks, and the last axis again joins
neighbours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from megabatch.errors import GridError

_MAX_SHAPES_SHOWN = 12
_MAX_RANKS_SHOWN = 8
_MAX_AXES, _MAX_DIGITS = 8, 9


@dataclass(frozen=True, slots=True)
class GridShape:
    """Sizes and names of the axes of a grid. The name of an axis says what the ranks along it form."""

    sizes: tuple[int, ...]
    names: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if not self.sizes or any(size < 1 for size in self.sizes):
            raise GridError(f"grid {self.text or '()'} has an axis without ranks; every axis needs at least 1")
        if not self.names:
            object.__setattr__(self, "names", _default_names(len(self.sizes)))
        if len(self.names) != len(self.sizes) or len(set(self.names)) != len(self.names):
            raise GridError(
                f"axis names {', '.join(self.names)} for grid {self.text}; "
                f"give {len(self.sizes)} different names, one per axis"
            )

    @property
    def text(self) -> str:
        """The shape as it is typed: "2x4"."""
        return "x".join(str(size) for size in self.sizes)

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    @property
    def axes(self) -> list[int]:
        """The axes that have more than one rank, the slowest first."""
        return [axis for axis, size in enumerate(self.sizes) if size > 1]

    def check_fits(self, world_size: int) -> None:
        """Raise `GridError` naming the shapes that fit unless the grid has exactly `world_size` ranks."""
        if self.world_size == world_size:
            return
        shapes = [shape.text for shape in fitting_shapes(world_size)]
        more = ", ..." if len(shapes) > _MAX_SHAPES_SHOWN else ""
        raise GridError(
            f"grid {self.text} needs {self.world_size} workers but the world has {world_size}; "
            f"shapes that fit: {', '.join(shapes[:_MAX_SHAPES_SHOWN])}{more}"
        )

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Position of a global rank along every axis."""
        if not 0 <= rank < self.world_size:
            raise GridError(f"rank {rank} is outside grid {self.text}; ranks are 0 to {self.world_size - 1}")
        return tuple(rank // self.stride(axis) % size for axis, size in enumerate(self.sizes))

    def stride(self, axis: int) -> int:
        """How far apart the ranks of two neighbours along an axis are."""
        return math.prod(self.sizes[axis + 1 :])

    def axis_ranks(self, rank: int, axis: int) -> tuple[int, ...]:
        """Global ranks on the line through `rank` along `axis`, in order of position."""
        stride = self.stride(axis)
        first = rank - self.coordinates(rank)[axis] * stride
        return tuple(range(first, first + self.sizes[axis] * stride, stride))

    def crosses_hosts(self, axis: int, hosts: Sequence[str]) -> bool:
        """Whether a line along `axis` has ranks on several hosts; `hosts[rank]` names the host of a rank."""
        return any(len({hosts[rank] for rank in line}) > 1 for line in self.lines(axis))

    def lines(self, axis: int) -> tuple[tuple[int, ...], ...]:
        """All lines along `axis`, that of the lowest rank first."""
        stride = self.stride(axis)
        block = stride * self.sizes[axis]
        return tuple(
            tuple(range(first, first + block, stride))
            for start in range(0, self.world_size, block)
            for first in range(start, start + stride)
        )


def parse_grid(text: str, names: Sequence[str] = ()) -> GridShape:
    """Read "2x4" (rows x columns) or "2x4x8" (slowest axis first)."""
    parts = text.strip().lower().split("x")
    is_size = all(part.isascii() and part.isdigit() and len(part) <= _MAX_DIGITS for part in parts)
    if not is_size or len(parts) > _MAX_AXES:
        raise GridError(f"grid '{text[:60]}' is not a shape; give sizes joined by x, slowest axis first, such as 2x4")
    return GridShape(tuple(int(part) for part in parts), tuple(names))


def fitting_shapes(world_size: int) -> list[GridShape]:
    """Every rows x columns grid of exactly `world_size` ranks, fewest rows first."""
    rows = [count for count in range(1, math.isqrt(world_size) + 1) if world_size % count == 0]
    rows += [world_size // count for count in reversed(rows) if count * count != world_size]
    return [GridShape((count, world_size // count)) for count in rows]


def near_square(world_size: int) -> GridShape:
    """The grid with the fewest torus steps, 2(X-1) + 2(Y-1); the longer axis is the fast one."""
    rows = next(count for count in range(math.isqrt(world_size), 0, -1) if world_size % count == 0)
    return GridShape((rows, world_size // rows))


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks for people, in order: "rank 3", "ranks 0, 2", "ranks 4 to 7"."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    shown = ", ".join(str(rank) for rank in ranks[:_MAX_RANKS_SHOWN])
    more = f" and {len(ranks) - _MAX_RANKS_SHOWN} more" if len(ranks) > _MAX_RANKS_SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def default_shape(hosts: Sequence[str]) -> tuple[GridShape, str]:
    """(shape, why) for ranks on these hosts, where the user gives none; `hosts[rank]` names the host of a rank.

    A row stays within a host and columns run between hosts, so that only a part of each message takes the slow way:

        a a a a b b b b   2x4, one host per row
        a a a a b b       3x2, uneven hosts: rows of the greatest common divisor of 4 and 2
        a a b b a a b b   4x2, likewise where a host has several stretches of ranks
        a a a a           2x2, one host: near square, for the fewest steps
        a b c d           2x2, one rank per host, or no common divisor: near square, as rows of one rank save no step
    """
    stretches = [len(list(ranks)) for _, ranks in itertools.groupby(hosts)]
    length = math.gcd(*stretches)
    if len(stretches) == 1 or length == 1:
        why = "all ranks are on one host" if len(stretches) == 1 else "hosts give no rows of equal length"
        return near_square(len(hosts)), f"near square: {why}"
    one_each = len(set(hosts)) == len(stretches) and set(stretches) == {length}
    reason = "one host per row" if one_each else "rows within hosts, which hold different numbers of consecutive ranks"
    return GridShape((len(hosts) // length, length)), reason


def _default_names(num_axes: int) -> tuple[str, ...]:
    if num_axes == 1:
        return ("row",)
    if num_axes == 2:
        return ("column", "row")
    return (*(f"axis {axis}" for axis in range(num_axes - 1)), "row")
