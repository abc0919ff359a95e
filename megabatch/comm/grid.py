"""ProcessGrid: the workers of a job laid out in rows and columns, with one process group per axis.

Groups are made with local synchronisation: a rank takes part only in the groups it belongs to, so set-up time
depends on the length of the axes and not on the size of the world. What the ranks must agree on - the shape,
and which of them share a host - goes through rank 0 and the job's key-value store: one write and one read per
rank.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from megabatch.comm.layout import agree_on_grid, host_name
from megabatch.comm.link import hang_up
from megabatch.comm.phases import WORLD
from megabatch.comm.rollcall import ALREADY_GIVEN_UP, Note, explain, roll_call
from megabatch.comm.shape import GridShape, parse_grid
from megabatch.errors import CommunicationError, GridError, LaunchError

__all__ = ["DEFAULT_TIMEOUT_SECONDS", "ProcessGrid", "uses_gloo"]

DEFAULT_TIMEOUT_SECONDS = 300.0

_ECHO_SECONDS = 0.2
_builds = itertools.count()


class ProcessGrid:
    """A grid over the whole world: this rank's position, the ranks along each axis, and their process groups.

    hosts: host name by rank, or empty when the grid was built without asking. reason: why it has this shape.
    kept: what `all_reduce` keeps between calls, by options.
    """

    def __init__(
        self,
        shape: GridShape,
        rank: int,
        groups: Sequence[dist.ProcessGroup | None],
        *,
        hosts: Sequence[str] = (),
        reason: str = "as given",
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        store: Store | None = None,
        build: str = "",
    ) -> None:
        self.shape = shape
        self.rank = rank
        self.coordinates = shape.coordinates(rank)
        self.hosts = tuple(hosts)
        self.reason = reason
        self.timeout_seconds = timeout_seconds
        self._groups = [*groups, None]  # the last one, index WORLD, is made when first asked for
        self.kept: dict[Any, Any] = {}
        self._store = store
        self._build = build
        self._calls = itertools.count()
        self._failure: str | None = None
        self._failing = threading.Lock()

    @classmethod
    def build(
        cls,
        shape: str | Sequence[int] | GridShape | None = None,
        *,
        axis_names: Sequence[str] = (),
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        agree: bool = True,
    ) -> ProcessGrid:
        """Lay the initialised world out as `shape` ("2x4", (2, 4)); every rank must call it.

        Without a shape, rows are hosts when all hosts hold equally many consecutive ranks (over 1), else the
        grid is near square. `timeout_seconds` bounds every later wait on this grid. `agree=False` skips the
        exchange of shape and host names with the other ranks; a shape is then needed.

        Raises:
            GridError: the shape does not fit the world, or differs between ranks.
            LaunchError: torch.distributed is not initialised, or ranks did not come within the timeout.
        """
        if not dist.is_initialized():
            raise LaunchError("no process group yet; call torch.distributed.init_process_group before making a grid")
        wanted = _as_shape(shape, axis_names)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if wanted is None and not agree:
            raise GridError("a grid without a shape must ask the other ranks; give a shape or leave agree on")
        prefix = f"megabatch/grid/{next(_builds)}"
        store = PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        hosts: tuple[str, ...] = ()
        reason = "as given"
        if agree:
            text = wanted.text if wanted else ""
            hosts, chosen, reason = agree_on_grid(store, rank, world_size, text, host_name(), timeout_seconds)
            wanted = wanted or parse_grid(chosen, axis_names)
        assert wanted is not None
        wanted.check_fits(world_size)
        groups = [_axis_group(wanted, rank, axis, timeout_seconds, prefix) for axis in range(len(wanted.sizes))]
        return cls(
            wanted,
            rank,
            groups,
            hosts=hosts,
            reason=reason,
            timeout_seconds=timeout_seconds,
            store=PrefixStore("failures", store),
            build=prefix,
        )

    @property
    def world_size(self) -> int:
        """Ranks in the whole grid."""
        return self.shape.world_size

    @property
    def separate_links(self) -> bool:
        """Whether rows stay inside hosts and columns leave them; False where hosts are not known."""
        rows = zip(*[iter(self.hosts)] * self.shape.sizes[-1], strict=True)
        return len(set(self.hosts)) > 1 and all(len(set(row)) == 1 for row in rows)

    def axis_size(self, axis: int) -> int:
        """Ranks along an axis; of the whole grid for `WORLD`."""
        return self.world_size if axis == WORLD else self.shape.sizes[axis]

    def axis_ranks(self, axis: int) -> tuple[int, ...]:
        """Global ranks on this rank's line along an axis, in order of position."""
        return tuple(range(self.world_size)) if axis == WORLD else self.shape.axis_ranks(self.rank, axis)

    def axis_position(self, axis: int) -> int:
        """This rank's position along an axis."""
        return self.rank if axis == WORLD else self.coordinates[axis]

    def group(self, axis: int) -> dist.ProcessGroup:
        """Process group of this rank's line along an axis, which must have more than one rank.

        The first request for `WORLD` on Gloo makes a group, so all ranks must join in it: the default group is
        left to others, whose collectives must not mix with ours, and which must survive when we hang up.
        """
        if axis == WORLD and self._groups[WORLD] is None:
            ranks = range(self.world_size)
            default = dist.group.WORLD
            assert default is not None
            own = uses_gloo(default)
            made = _new_group(ranks, "world", self.timeout_seconds, self._build) if own else default
            self._groups[WORLD] = made
        group = self._groups[axis]
        assert group is not None, f"axis {axis} of grid {self.shape.text} has a single rank and no group"
        return group

    def next_call(self) -> int:
        """Number of the next call on this grid; equal on all ranks, as they begin calls in the same order."""
        self.check_usable()
        return next(self._calls)

    def check_usable(self) -> None:
        """Raise the error that broke this grid, if one did."""
        if self._failure is not None:
            raise CommunicationError(self._failure)

    def fail(self, note: Note) -> CommunicationError:
        """Give the grid up: free the ranks that wait for this one, hear what they saw, return the error."""
        if note.cause == ALREADY_GIVEN_UP:
            time.sleep(_ECHO_SECONDS)  # an echo: the thread that knows the cause is on its way here
        with self._failing:
            if self._failure is None:
                for group in self._groups:
                    if group is not None and uses_gloo(group):
                        hang_up(group)
                notes = {self.rank: note}
                if self._store is not None:
                    notes = roll_call(self._store, note, self.world_size)
                self._failure = explain(note, notes, self.world_size)
            return CommunicationError(self._failure)

    def close(self) -> None:
        """Destroy the groups this grid has made."""
        for group in self._groups:
            if group is not None and group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        self._groups = [None] * len(self._groups)
        self.kept.clear()


def _as_shape(shape: str | Sequence[int] | GridShape | None, names: Sequence[str]) -> GridShape | None:
    if shape is None or isinstance(shape, GridShape):
        return shape
    return parse_grid(shape, names) if isinstance(shape, str) else GridShape(tuple(shape), tuple(names))


def _axis_group(shape: GridShape, rank: int, axis: int, timeout_seconds: float, build: str) -> dist.ProcessGroup | None:
    """The group along one axis; all ranks take the axes in the same order, so none wait crosswise."""
    if shape.sizes[axis] == 1:
        return None
    return _new_group(shape.axis_ranks(rank, axis), shape.names[axis], timeout_seconds, build)


def _new_group(ranks: Sequence[int], name: str, timeout_seconds: float, build: str) -> dist.ProcessGroup:
    try:
        with _group_named(f"{build} {name} {list(ranks)}"):
            group: dist.ProcessGroup = dist.new_group(
                list(ranks),
                timeout=timedelta(seconds=timeout_seconds),
                use_local_synchronization=True,
                group_desc=f"megabatch {name}",
            )
    except RuntimeError as error:
        shown = ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
        raise LaunchError(
            f"the {name} of ranks {shown} could not connect within {timeout_seconds:g} s "
            f"({str(error).splitlines()[0]}); look at their logs and at the network between them"
        ) from error
    return group


@contextmanager
def _group_named(text: str) -> Iterator[None]:
    """Within this block torch calls a new group after `text`.

    By itself torch names a group after its ranks and the number of groups that now exist. A grid built after another
    was closed would get that one's names, and find its dead addresses in the job's store; and ranks that hold different
    numbers of groups would wait under different names.
    """
    name = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    torch_module: Any = dist.distributed_c10d
    torch_names = torch_module._process_group_name
    torch_module._process_group_name = lambda *_, **__: name
    try:
        yield
    finally:
        torch_module._process_group_name = torch_names


def uses_gloo(group: dist.ProcessGroup) -> bool:
    """Whether tensors on the CPU travel by Gloo in this group."""
    return "cpu:gloo" in str(dist.get_backend_config(group))
