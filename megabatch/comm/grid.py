"""ProcessGrid: the workers of a job laid out in rows and columns, with one process group per axis.

Groups are made with local synchronisation: a rank takes part only in the groups it belongs to, so set-up time depends
on the length of the axes and not on the size of the world. Which shape the grid has, and which ranks share a host, goes
through the main rank and the job's key-value store before any communicator exists: one write and one read per rank.
Ranks that were given different shapes, or do not come, end everywhere with the same one-line reason.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh

from megabatch.comm.calibration import Choice
from megabatch.comm.device import device_name, same_device
from megabatch.comm.p2p import Link, hang_up, new_group, uses_gloo
from megabatch.comm.phases import WORLD
from megabatch.comm.shape import GridShape, default_shape, parse_grid, ranks_text
from megabatch.comm.shared_memory import SharedAxes
from megabatch.errors import CommunicationError, GridError, LaunchError
from megabatch.machine import host_name

__all__ = ["ProcessGrid"]

DEFAULT_TIMEOUT_SECONDS = 300.0
MAIN_RANK_GRACE_SECONDS = 10.0

_builds = itertools.count()


class Reducer(Protocol):
    """What reduces tensors over a grid by one algorithm, or by several: `AllReducer`, `AutoReducer`."""

    @property
    def algorithm(self) -> str: ...
    @property
    def algorithms(self) -> frozenset[str]: ...
    @property
    def explanation(self) -> list[str]: ...
    def run(self, tensor: torch.Tensor, *, task: str = ..., call: int | None = None) -> None: ...
    def close(self) -> None: ...


class Layout(NamedTuple):
    """What all ranks of a grid know alike. hosts: host name by rank, or empty when nobody asked. reason: why so."""

    shape: GridShape
    hosts: tuple[str, ...] = ()
    reason: str = "as given"


class ProcessGrid:
    """A grid over the whole world: this rank's position, the ranks along each axis, and their process groups.

    hosts: host name by rank, or empty when the grid was built without asking. reason: why it has this shape.
    choices: what `algorithm="auto"` uses here; written once, by `select`. store: the job's, for this grid's failure
    report. failure: what broke the grid; written under `failing`. A grid is a context manager: leaving it closes it.
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
        shared_memory: bool = False,
    ) -> None:
        self.shape = shape
        self.rank = rank
        self.coordinates = shape.coordinates(rank)
        self.hosts = tuple(hosts)
        self.reason = reason
        self.timeout_seconds = timeout_seconds
        self.choices: tuple[Choice, ...] = ()
        self.store = store
        self.asks_who_is_missing = True  # before it gives up; an elastic run has a lighthouse to say so, and at once
        self.failure: str | None = None
        self.failing = threading.Lock()
        self._groups = [*groups, None]  # the last one, index WORLD, is made when first asked for
        self._owns_groups = owns_groups
        self._build = build
        self._calls = itertools.count()
        self._reducers: dict[tuple[str, bool, torch.dtype | None], Reducer] = {}
        self._claimed_tags: set[int] = set()
        self._closed = False
        self.memory = SharedAxes(wanted=shared_memory)

    def __enter__(self) -> ProcessGrid:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @classmethod
    def build(
        cls,
        shape: str | Sequence[int] | GridShape | DeviceMesh | None = None,
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        check_consistency: bool = True,
        name: str = "",
        shared_memory: bool = True,
    ) -> ProcessGrid:
        """Lay the initialised world out as `shape` ("2x4", (2, 4), or a mesh of torch); every rank must call it.

        Without a shape it is the `default_shape`: rows are hosts where that can be. The groups of a `DeviceMesh` over
        the whole world, of any number of dimensions, are used as they are and stay the mesh's own. `timeout_seconds`
        bounds every later wait on this grid. `check_consistency=False` skips the exchange of shape and host names
        with the other ranks; a shape is then needed. Grids of one world are told apart by their number; ranks that
        have made different numbers of them must give a name. With `shared_memory`, ranks along an axis that lies in one
        host reduce through memory they share, where the machine offers it.

        Raises:
            GridError: the shape does not fit the world, or differs between ranks.
            LaunchError: torch.distributed is not initialised, or ranks did not come within the timeout.
        """
        if not dist.is_initialized():
            raise LaunchError("no process group yet; call torch.distributed.init_process_group before making a grid")
        wanted = _as_shape(shape)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        prefix = f"megabatch/grid/{name}" if name else _next_prefix()
        store = PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        if check_consistency:
            layout = check_grid_consistency(
                store, rank, world_size, wanted, host_name(), timeout_seconds, _own_device()
            )
        elif wanted is not None:
            layout = Layout(wanted)
        else:
            raise GridError("a grid without a shape must ask the other ranks; give one or leave check_consistency on")
        layout.shape.check_fits(world_size)
        axes = range(len(layout.shape.sizes))
        if isinstance(shape, DeviceMesh):
            groups = [shape.get_group(axis) if layout.shape.sizes[axis] > 1 else None for axis in axes]
        else:
            groups = [_axis_group(layout.shape, rank, axis, timeout_seconds, prefix) for axis in axes]
        grid = cls(
            layout.shape,
            rank,
            groups,
            hosts=layout.hosts,
            reason=layout.reason,
            timeout_seconds=timeout_seconds,
            store=PrefixStore("failures", store),
            build=prefix,
            owns_groups=not isinstance(shape, DeviceMesh),
            shared_memory=shared_memory,
        )
        for axis in layout.shape.axes:
            grid._share_memory(axis)
        return grid

    @property
    def world_size(self) -> int:
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
            default = dist.group.WORLD
            if default is not None and uses_gloo(default):
                default = new_group(range(self.world_size), "world", self.timeout_seconds, self._build)
            self._groups[WORLD] = default
            self._share_memory(WORLD)
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
        """Raise the error that broke this grid, if one did; a closed grid is of no use either."""
        if self.failure is not None:
            raise CommunicationError(self.failure)
        if self._closed:
            raise CommunicationError(f"grid {self.shape.text} is closed; build another one")

    def reducer(
        self,
        make: Callable[[], Reducer],
        algorithm: str,
        *,
        average: bool = False,
        grad_dtype: torch.dtype | None = None,
    ) -> Reducer:
        """The reducer that is cached for these options, made on the first request; the grid closes it."""
        self.check_usable()
        options = (algorithm, average, grad_dtype)
        if options not in self._reducers:
            self._reducers[options] = make()
        return self._reducers[options]

    def claim_tag(self, tag: int) -> bool:
        """Whether `tag`, for messages that are received again and again, was free; from now on it is taken."""
        free = tag not in self._claimed_tags
        self._claimed_tags.add(tag)
        return free

    def hang_up(self) -> None:
        """Close this rank's connections, so that ranks waiting for it fail at once."""
        self.memory.hang_up()
        for group in self._groups:
            if group is not None and uses_gloo(group):
                hang_up(group)

    def close(self) -> None:
        """Release the cached reducers and the process groups that this grid made; a second call does nothing.

        The default group and those of a `DeviceMesh` stay. Nothing of this grid can be used afterwards.
        """
        self._closed = True
        for reducer in self._reducers.values():
            reducer.close()
        self._reducers.clear()
        self.memory.close()
        for group in self._groups if self._owns_groups else self._groups[WORLD:]:
            # Whoever ended torch.distributed before has ended our groups with it.
            if group is not dist.group.WORLD and group in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)
        self._groups = [None] * len(self._groups)

    def _share_memory(self, axis: int) -> None:
        self.memory.join(axis, self.group(axis), self.axis_ranks(axis), self.axis_position(axis))


def default_grid(timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> GridShape:
    """The `default_shape` of the initialised world; every rank must call it and gets the same.

    Raises:
        LaunchError: ranks did not come within the timeout.
    """
    store = PrefixStore(_next_prefix(), dist.distributed_c10d._get_default_store())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return check_grid_consistency(store, rank, world_size, None, host_name(), timeout_seconds, _own_device()).shape


def check_grid_consistency(
    store: Store,
    rank: int,
    world_size: int,
    wanted: GridShape | None,
    host: str,
    timeout_seconds: float,
    device: str = "",
) -> Layout:
    """The layout on which all ranks rely: the main rank collects each rank's shape and place, decides, and tells all.

    Without a `wanted` shape on all ranks, it is the `default_shape` of their hosts.
    device: what a rank must have for itself alone; empty where it may be shared.

    Raises:
        GridError: ranks gave different shapes.
        LaunchError: ranks did not come within the timeout, or two have the same device.
    """
    store.set(f"entry {rank}", json.dumps([wanted.text if wanted else "", host, device]))
    if rank == 0:
        store.set("verdict", json.dumps(_verdict(store, world_size, timeout_seconds)))
    # The main rank needs its whole timeout to find out who is missing; only then can it say so.
    try:
        store.wait(["verdict"], timedelta(seconds=timeout_seconds + MAIN_RANK_GRACE_SECONDS))
    except RuntimeError:
        raise LaunchError(
            f"the main rank did not say within {timeout_seconds:g} s how the grid lies; look at the log of rank 0"
        ) from None
    decided = json.loads(store.get("verdict"))
    if "cannot launch" in decided:
        raise LaunchError(decided["cannot launch"])
    if "differs" in decided:
        raise GridError(decided["differs"])
    return Layout(wanted or parse_grid(decided["shape"]), tuple(decided["hosts"]), decided["reason"])


def _own_device() -> str:
    """What tells this rank's device from all others of its host, where NCCL needs one for each rank."""
    if "nccl" not in str(dist.get_backend()) or not torch.cuda.is_available():
        return ""
    return device_name(torch.device("cuda", torch.cuda.current_device()))


def _verdict(store: Store, world_size: int, timeout_seconds: float) -> dict[str, object]:
    """The main rank's decision, or why there is none."""
    keys = [f"entry {rank}" for rank in range(world_size)]
    with contextlib.suppress(RuntimeError):
        store.wait(keys, timedelta(seconds=timeout_seconds))
    missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    if missing:
        said = f"no grid: {ranks_text(missing)} did not come within {timeout_seconds:g} s"
        return {"cannot launch": f"{said}; look at the log of rank {missing[0]}"}
    entries = [tuple(json.loads(value)) for value in store.multi_get(keys)]
    hosts = [host for _, host, _ in entries]
    if shared := same_device([(host, device) for _, host, device in entries]):
        return {"cannot launch": shared}
    by_shape: dict[str, list[int]] = {}
    for rank, (text, _, _) in enumerate(entries):
        by_shape.setdefault(text or "none", []).append(rank)
    if len(by_shape) > 1:
        shapes = "; ".join(f"{text} on {ranks_text(ranks)}" for text, ranks in by_shape.items())
        return {"differs": f"grid shapes differ between workers ({shapes}); give every worker the same shape"}
    if entries[0][0]:
        return {"hosts": hosts, "shape": entries[0][0], "reason": "as given"}
    shape, reason = default_shape(hosts)
    return {"hosts": hosts, "shape": shape.text, "reason": reason}


def _next_prefix() -> str:
    """Keys of one consistency check in the job's store; all ranks make theirs in the same order."""
    return f"megabatch/grid/{next(_builds)}"


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
    ranks = shape.axis_ranks(rank, axis)
    return new_group(ranks, shape.names[axis], timeout_seconds, build) if len(ranks) > 1 else None
