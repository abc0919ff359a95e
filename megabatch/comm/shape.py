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

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from megabatch.errors import GridError

__all__ = ["GridShape", "fitting_shapes", "near_square", "parse_grid", "ranks_text", "rows_by_host"]

_MAX_SHAPES_SHOWN = 12
_MAX_RANKS_SHOWN = 8


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
        """Ranks in the whole grid."""
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
        self._check_rank(rank)
        position = []
        for size in reversed(self.sizes):
            rank, along = divmod(rank, size)
            position.append(along)
        return tuple(reversed(position))

    def rank(self, coordinates: Sequence[int]) -> int:
        """Global rank at the given position."""
        inside = all(0 <= along < size for along, size in zip(coordinates, self.sizes, strict=False))
        if len(coordinates) != len(self.sizes) or not inside:
            raise GridError(f"position {tuple(coordinates)} is outside grid {self.text}; axes count from 0")
        rank = 0
        for along, size in zip(coordinates, self.sizes, strict=True):
            rank = rank * size + along
        return rank

    def axis_ranks(self, rank: int, axis: int) -> tuple[int, ...]:
        """Global ranks on the line through `rank` along `axis`, in order of position."""
        self._check_rank(rank)
        stride = math.prod(self.sizes[axis + 1 :])
        first = rank - self.coordinates(rank)[axis] * stride
        return tuple(range(first, first + self.sizes[axis] * stride, stride))

    def lines(self, axis: int) -> tuple[tuple[int, ...], ...]:
        """All lines along `axis`, that of the lowest rank first."""
        stride = math.prod(self.sizes[axis + 1 :])
        block = stride * self.sizes[axis]
        return tuple(
            tuple(range(first, first + block, stride))
            for start in range(0, self.world_size, block)
            for first in range(start, start + stride)
        )

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise GridError(f"rank {rank} is outside grid {self.text}; ranks are 0 to {self.world_size - 1}")


def parse_grid(text: str, names: Sequence[str] = ()) -> GridShape:
    """Read "2x4" (rows x columns) or "2x4x8" (slowest axis first)."""
    parts = text.strip().lower().split("x")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise GridError(f"grid '{text}' is not a shape; give sizes joined by x, slowest axis first, such as 2x4")
    return GridShape(tuple(int(part) for part in parts), tuple(names))


def fitting_shapes(world_size: int) -> list[GridShape]:
    """Every rows x columns grid of exactly `world_size` ranks, fewest rows first."""
    rows = [count for count in range(1, world_size + 1) if world_size % count == 0]
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


def rows_by_host(hosts: Sequence[str]) -> GridShape | None:
    """One host per row when every host holds the same number (over 1) of consecutive ranks, else None.

    `hosts[rank]` names the host of a rank. A single host gives None: it has no slow axis to save bytes on.
    """
    runs: list[tuple[str, int]] = []
    for host in hosts:
        if runs and runs[-1][0] == host:
            runs[-1] = (host, runs[-1][1] + 1)
        else:
            runs.append((host, 1))
    lengths = {length for _, length in runs}
    one_run_each = len({host for host, _ in runs}) == len(runs)
    if len(runs) < 2 or not one_run_each or len(lengths) != 1 or lengths == {1}:
        return None
    return GridShape((len(runs), lengths.pop()))


def _default_names(num_axes: int) -> tuple[str, ...]:
    if num_axes == 1:
        return ("row",)
    if num_axes == 2:
        return ("column", "row")
    return (*(f"axis {axis}" for axis in range(num_axes - 1)), "row")
