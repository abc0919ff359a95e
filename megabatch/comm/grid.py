"""ProcessGrid: the workers of a job laid out in rows and columns, with one process group per axis.

Groups are made with local synchronisation: a rank takes part only in the groups it belongs to, so set-up time depends
on the length of the axes and not on the size of the world. What the ranks must agree on - the shape, and which of them
share a host - goes through rank 0 and the job's key-value store, before any communicator exists: one write and one read
per rank. Ranks that were given different shapes, or do not come, end everywhere with the same one-line reason.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh

from megabatch.comm.p2p import Link, hang_up, uses_gloo
from megabatch.comm.phases import WORLD
from megabatch.comm.shape import GridShape, near_square, parse_grid, ranks_text, rows_by_host
from megabatch.errors import CommunicationError, GridError, LaunchError

__all__ = ["DEFAULT_TIMEOUT_SECONDS", "ProcessGrid", "agree_on_grid", "host_name"]

DEFAULT_TIMEOUT_SECONDS = 300.0
RANK_0_GRACE_SECONDS = 10.0

_builds = itertools.count()


class ProcessGrid:
    """A grid over the whole world: this rank's position, the ranks along each axis, and their process groups.

    hosts: host name by rank, or empty when the grid was built without asking. reason: why it has this shape.
    cache: what `all_reduce` uses again in later calls, by options. store: the job's, for this grid's failure report.
    failure: what broke the grid; written under `failing`.
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
        owns_groups: bool = True,
    ) -> None:
        self.shape = shape
        self.rank = rank
        self.coordinates = shape.coordinates(rank)
        self.hosts = tuple(hosts)
        self.reason = reason
        self.timeout_seconds = timeout_seconds
        self.cache: dict[Any, Any] = {}
        self.store = store
        self.failure: str | None = None
        self.failing = threading.Lock()
        self._groups = [*groups, None]  # the last one, index WORLD, is made when first asked for
        self._owns_groups = owns_groups
        self._build = build
        self._calls = itertools.count()

    @classmethod
    def build(
        cls,
        shape: str | Sequence[int] | GridShape | DeviceMesh | None = None,
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        agree: bool = True,
    ) -> ProcessGrid:
        """Lay the initialised world out as `shape` ("2x4", (2, 4), or a mesh of torch); every rank must call it.

        Without a shape, rows are hosts when all hosts hold equally many consecutive ranks (over 1), else the
        grid is near square. The groups of a `DeviceMesh` over the whole world, of any number of dimensions, are
        used as they are and stay the mesh's own. `timeout_seconds` bounds every later wait on this grid.
        `agree=False` skips the exchange of shape and host names with the other ranks; a shape is then needed.

        Raises:
            GridError: the shape does not fit the world, or differs between ranks.
            LaunchError: torch.distributed is not initialised, or ranks did not come within the timeout.
        """
        if not dist.is_initialized():
            raise LaunchError("no process group yet; call torch.distributed.init_process_group before making a grid")
        wanted = _as_shape(shape)
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
            wanted = wanted or parse_grid(chosen)
        assert wanted is not None
        wanted.check_fits(world_size)
        if isinstance(shape, DeviceMesh):
            groups = [shape.get_group(axis) if size > 1 else None for axis, size in enumerate(wanted.sizes)]
        else:
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
            owns_groups=not isinstance(shape, DeviceMesh),
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

    def on_gloo(self, axes: Iterable[int]) -> bool:
        """Whether tensors on the CPU travel along all of `axes` by our primitives, not by the backend's own."""
        return all(uses_gloo(self.group(axis)) for axis in axes)

    def link(self, axis: int) -> Link:
        """A new link to the ranks on this rank's line along an axis."""
        return Link(self.group(axis), self.axis_ranks(axis), self.axis_position(axis), self.timeout_seconds)

    def next_call(self) -> int:
        """Number of the next call on this grid; equal on all ranks, as they begin calls in the same order."""
        self.check_usable()
        return next(self._calls)

    def check_usable(self) -> None:
        """Raise the error that broke this grid, if one did."""
        if self.failure is not None:
            raise CommunicationError(self.failure)

    def hang_up(self) -> None:
        """Close this rank's connections, so that ranks waiting for it fail at once."""
        for group in self._groups:
            if group is not None and uses_gloo(group):
                hang_up(group)

    def close(self) -> None:
        """Destroy the groups this grid has made."""
        made = self._groups if self._owns_groups else self._groups[WORLD:]
        for group in made:
            if group is not None and group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        self._groups = [None] * len(self._groups)
        self.cache.clear()


def agree_on_grid(
    store: Store, rank: int, world_size: int, shape_text: str, host: str, timeout_seconds: float
) -> tuple[tuple[str, ...], str, str]:
    """(host by rank, shape, why): rank 0 collects each rank's shape and host, decides, and tells everybody.

    An empty `shape_text` on all ranks lets rank 0 choose.

    Raises:
        GridError: ranks gave different shapes. LaunchError: ranks did not come within the timeout.
    """
    store.set(f"entry {rank}", json.dumps([shape_text, host]))
    if rank == 0:
        store.set("verdict", json.dumps(_verdict(store, world_size, timeout_seconds)))
    # Rank 0 needs its whole timeout to find out who is missing; only then can it say so.
    try:
        store.wait(["verdict"], timedelta(seconds=timeout_seconds + RANK_0_GRACE_SECONDS))
    except RuntimeError:
        raise LaunchError(
            f"rank 0 did not say within {timeout_seconds:g} s how the grid lies; look at the log of rank 0"
        ) from None
    decided = json.loads(store.get("verdict"))
    if "missing" in decided:
        raise LaunchError(decided["missing"])
    if "differs" in decided:
        raise GridError(decided["differs"])
    return tuple(decided["hosts"]), decided["shape"], decided["reason"]


def host_name() -> str:
    """Name of this host; `MEGABATCH_HOST` overrides it where hosts share a name, as network namespaces do."""
    return os.environ.get("MEGABATCH_HOST") or socket.gethostname()


def _verdict(store: Store, world_size: int, timeout_seconds: float) -> dict[str, object]:
    """Rank 0's decision, or why there is none."""
    keys = [f"entry {rank}" for rank in range(world_size)]
    with contextlib.suppress(RuntimeError):
        store.wait(keys, timedelta(seconds=timeout_seconds))
    missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    if missing:
        told = f"no grid: {ranks_text(missing)} did not come within {timeout_seconds:g} s"
        return {"missing": f"{told}; look at the log of rank {missing[0]}"}
    entries = [tuple(json.loads(value)) for value in store.multi_get(keys)]
    hosts = [host for _, host in entries]
    by_shape: dict[str, list[int]] = {}
    for rank, (text, _) in enumerate(entries):
        by_shape.setdefault(text or "none", []).append(rank)
    if len(by_shape) > 1:
        told = "; ".join(f"{text} on {ranks_text(ranks)}" for text, ranks in by_shape.items())
        return {"differs": f"grid shapes differ between workers ({told}); give every worker the same shape"}
    if entries[0][0]:
        return {"hosts": hosts, "shape": entries[0][0], "reason": "as given"}
    by_host = rows_by_host(hosts)
    shape = by_host or near_square(world_size)
    reason = "one host per row" if by_host else "near square: hosts give no rows of equal length"
    return {"hosts": hosts, "shape": shape.text, "reason": reason}


def _as_shape(shape: str | Sequence[int] | GridShape | DeviceMesh | None) -> GridShape | None:
    if isinstance(shape, DeviceMesh):
        ranks = shape.mesh.flatten().tolist()
        if ranks != list(range(dist.get_world_size())):
            raise GridError(
                f"the mesh holds {ranks_text(ranks)}; give one of all ranks of the world, in order, row by row"
            )
        return GridShape(tuple(shape.mesh.shape), tuple(shape.mesh_dim_names or ()))
    if shape is None or isinstance(shape, GridShape):
        return shape
    return parse_grid(shape) if isinstance(shape, str) else GridShape(tuple(shape))


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
        raise LaunchError(
            f"the {name} of {ranks_text(ranks)} could not connect within {timeout_seconds:g} s "
            f"({str(error).splitlines()[0]}); look at their logs and at the network between them"
        ) from error
    return group


@contextlib.contextmanager
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
