"""Ranks of one host reduce through memory that all of them have mapped, not through sockets. `shared.c` does the work.

The ranks along an axis of the grid decide together, when the grid is built. They tell each other host, boot, network
and helper; position 0 makes a memory file (`memfd_create`), the others open it through `/proc`, map it and look for a
random mark; only if all of them found it is it used. Otherwise messages go over Gloo as before.

The memory file has no name, so nobody can guess one and nothing is left behind, however a process ends: the kernel
frees it with its last user. It is open to its owner alone (mode 0600, and `/proc` shows descriptors of own processes
only), and sealed, so that nobody can cut it short. The size of `/dev/shm` is no limit to it, and a page of it is there
whenever any page of memory is: where the kernel promises less (`vm.overcommit_memory = 2`), it is not used.

A segment holds `LANES` lanes, each for one collective at a time. Reducers claim theirs in the same order on all ranks,
as they make their process groups. Memory that no message has passed through costs nothing.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import mmap
import os
import secrets
import subprocess
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megabatch.comm.p2p import PeerLostError, uses_gloo
from megabatch.comm.shape import ranks_text
from megabatch.errors import LaunchError, WriteError, first_line
from megabatch.machine import build, host_name, usable_cores

_log = logging.getLogger(__name__)

LANES = 128
"""Collectives of one axis that can go on at the same time, each for a channel of a reducer."""

MOST_RANKS = 256
"""On one axis; as in `shared.c`."""

_SOURCE = Path(__file__).with_name("shared.c")
_DTYPES = {torch.int32: 0, torch.float32: 1, torch.float64: 2, torch.float16: 3, torch.bfloat16: 4}
_ORDERS = {"direct": 0, "ring": 1, "chain": 2, "halving": 3}
_LINE_BYTES = 64
_PAGE_BYTES = 4096
_HALF_SLOT_BYTES = 2**20
_LANE_BYTES = 32 * 2**20  # at most, where an axis has many ranks
_SPINS = 2000  # about 20 microseconds


class _LaneStruct(ctypes.Structure):
    """As `struct lane` in `shared.c`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("arrivals", "sleepers", "records", "slots", "hung_up", "processes")),
        *((name, ctypes.c_int64) for name in ("half_bytes", "timeout_ns")),
        *((name, ctypes.c_int32) for name in ("size", "position", "spins")),
    )


class SharedMemory:
    """What the ranks along one axis have mapped; `ranks` are global. Made by `share_memory`."""

    def __init__(self, memory: mmap.mmap, ranks: Sequence[int], position: int, pids: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.position = position
        self._memory = memory  # must not end before the last lane
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        watched = [-1 if place == position else os.pidfd_open(pid) for place, pid in enumerate(pids)]
        self._processes = (ctypes.c_int32 * len(pids))(*watched)
        weakref.finalize(self, _close_all, [number for number in watched if number >= 0])

    def lane(self, number: int, timeout_seconds: float) -> Lane:
        """This rank's end of a lane; the timeout bounds every wait for another rank."""
        size = len(self.ranks)
        control = self._start + _PAGE_BYTES + number * _control_bytes(size)
        return Lane(
            self,
            _LaneStruct(
                arrivals=control,
                sleepers=control + 4,
                records=control + _LINE_BYTES,
                slots=self._start + _data_start(size) + number * 2 * size * _half_bytes(size),
                hung_up=self._start + _LINE_BYTES,
                processes=ctypes.addressof(self._processes),
                half_bytes=_half_bytes(size),
                timeout_ns=int(timeout_seconds * 1e9),
                size=size,
                position=self.position,
                # Where ranks share cores, a rank that spins keeps the others from coming.
                spins=_SPINS if usable_cores() >= size else 0,
            ),
        )

    def hang_up(self) -> None:
        """Free the ranks that wait for this one, now and later."""
        size = len(self.ranks)
        own = self._start + _LINE_BYTES + 4 * self.position
        _library().megabatch_hang_up(own, self._start + _PAGE_BYTES, _control_bytes(size), LANES)


class Lane:
    """One rank's end of a lane: what `Link` is for Gloo. Used by one thread at a time."""

    __slots__ = ("_memory", "_struct", "position", "ranks", "size")

    def __init__(self, memory: SharedMemory, struct: _LaneStruct) -> None:
        self._memory, self._struct = memory, struct
        self.ranks, self.position, self.size = memory.ranks, memory.position, len(memory.ranks)

    def run(self, function: str, part: torch.Tensor, *options: int, tag: int) -> None:
        """Do one collective on a contiguous `part`, in place.

        Raises:
            PeerLostError: a rank is gone, did not come in time, or reduces something else.
        """
        if not part.numel():
            return
        work = getattr(_library(), f"megabatch_{function}")
        address = ctypes.byref(self._struct)
        lost = work(address, part.data_ptr(), part.numel(), _DTYPES[part.dtype], *options, tag & 0xFFFFFFFF)
        if lost:
            raise PeerLostError(self.ranks[abs(lost) - 1], timed_out=lost < 0)

    def flush(self) -> None:
        """Nothing is ever under way after a collective."""


class SharedAxes:
    """Along which axes of a grid this rank shares memory, and which lanes are free.

    wanted: of this rank; one that does not want it is enough for all on its axis to go without.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._by_axis: dict[int, SharedMemory] = {}
        self._free = list(range(LANES))

    def __contains__(self, axis: int) -> bool:
        return axis in self._by_axis

    def join(self, axis: int, group: dist.ProcessGroup, ranks: Sequence[int], position: int) -> None:
        """Share memory along an axis where its ranks can; all of them must call it. See `share_memory`."""
        memory = share_memory(group, ranks, position, wanted=self._wanted)
        if memory is not None:
            self._by_axis[axis] = memory

    def claim(self, count: int) -> list[int]:
        """Lanes for the channels of a reducer; none where there are not enough of them.

        All ranks must claim and release in the same order, as they make reducers.
        """
        claimed = self._free[:count] if count <= len(self._free) else []
        self._free = self._free[len(claimed) :]
        return claimed

    def release(self, lanes: Iterable[int]) -> None:
        """Give lanes back; what their last users are still reading is safe there."""
        self._free = sorted([*self._free, *lanes])

    def lane(self, axis: int, number: int | None, timeout_seconds: float) -> Lane | None:
        """This rank's end of a lane along an axis; None without a number, and where its ranks do not share memory."""
        memory = None if number is None else self._by_axis.get(axis)
        return None if memory is None or number is None else memory.lane(number, timeout_seconds)

    def hang_up(self) -> None:
        """Free the ranks that wait for this one."""
        for memory in self._by_axis.values():
            memory.hang_up()

    def close(self) -> None:
        """Hang up and let go of the memory, which lives on while a lane of it does."""
        self.hang_up()
        self._by_axis.clear()


def share_memory(group: dist.ProcessGroup, ranks: Sequence[int], position: int, *, wanted: bool) -> SharedMemory | None:
    """The memory of these ranks, or None where they cannot have one; every rank of the group must call it.

    Raises:
        LaunchError: a rank was lost meanwhile.
    """
    if not uses_gloo(group):
        return None
    helper, reason = _loaded() if wanted else (None, "")
    mark = secrets.randbits(62)
    file = -1
    shared = None
    try:
        if helper is not None and position == 0 and len(ranks) <= MOST_RANKS:
            with suppress(OSError):
                file = _make_file(len(ranks), mark)
        offers = _gathered(group, [helper is not None, _here(), os.getpid(), file, mark])
        are_together = len({here for _, here, *_ in offers}) == 1
        if are_together and all(able for able, *_ in offers):
            reason = "they could not map one memory file"
            with suppress(OSError, AttributeError):  # no process file descriptors before Linux 5.3
                memory = _mapped(*offers[0][2:])
                shared = SharedMemory(memory, ranks, position, [pid for _, _, pid, *_ in offers])
            # Position 0 keeps the file open until all have looked for it.
            if not all(found for (found,) in _gathered(group, [shared is not None])):
                shared = None
    except RuntimeError as error:
        raise LaunchError(
            f"{ranks_text(ranks)} could not agree on shared memory ({first_line(error)}); look at their logs"
        ) from error
    finally:
        if file >= 0:
            os.close(file)
    if shared is None and reason and are_together and ranks[position] == 0:
        _say_once(reason)
    return shared


def serves(dtype: torch.dtype) -> bool:
    """Whether lanes can sum elements of this type; the same on all ranks of a host."""
    library = _loaded()[0]
    return library is not None and (dtype != torch.float16 or bool(library.megabatch_has_float16()))


def _primitive(function: str, *options: int) -> Callable[..., Generator[None, None, None]]:
    """With the same two halves as those on Gloo; the first half does nothing."""

    def run(lane: Lane, part: torch.Tensor, tag: int, *_: object) -> Generator[None, None, None]:
        while True:
            yield
            lane.run(function, part, *options, tag=tag)
            yield

    return run


def _halving(lane: Lane, part: torch.Tensor, tag: int, *_: object) -> Generator[None, None, None]:
    while True:
        yield
        lane.run("reduce_scatter", part, _ORDERS["halving"], tag=tag)
        lane.run("all_gather", part, tag=tag)
        yield


SHARED: dict[tuple[str, str], Callable[..., Generator[None, None, None]]] = {
    ("reduce_scatter", "ring"): _primitive("reduce_scatter", _ORDERS["ring"]),
    ("reduce_scatter", "direct"): _primitive("reduce_scatter", _ORDERS["direct"]),
    ("all_gather", "ring"): _primitive("all_gather"),
    ("all_gather", "direct"): _primitive("all_gather"),
    ("exchange", "direct"): _primitive("reduce", _ORDERS["direct"], 1),
    ("all_reduce", "halving"): _halving,
    ("reduce", "chain"): _primitive("reduce", _ORDERS["chain"], 0),
    ("broadcast", "chain"): _primitive("broadcast"),
}
"""(operation, pattern) -> primitive on a `Lane`, with the bits of the one on Gloo."""


def _half_bytes(size: int) -> int:
    return min(_HALF_SLOT_BYTES, _LANE_BYTES // (2 * size)) // _PAGE_BYTES * _PAGE_BYTES


def _control_bytes(size: int) -> int:
    """Of a lane: a line for what all write, one for each rank."""
    return _LINE_BYTES * (1 + size)


def _data_start(size: int) -> int:
    return -(-(_PAGE_BYTES + LANES * _control_bytes(size)) // _PAGE_BYTES) * _PAGE_BYTES


def _make_file(size: int, mark: int) -> int:
    """A memory file for an axis of `size` ranks, with its mark."""
    file = os.memfd_create("megabatch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(file, 0o600)
    os.ftruncate(file, _data_start(size) + LANES * 2 * size * _half_bytes(size))
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    os.pwrite(file, mark.to_bytes(8, "little"), 0)
    return file


def _mapped(pid: int, number: int, mark: int) -> mmap.mmap:
    """The memory file that process `pid` holds open as `number`; OSError where it cannot be had or has another mark."""
    place = f"/proc/{pid}/fd/{number}"
    if not os.readlink(place).startswith("/memfd:megabatch"):
        raise OSError(f"{place} is another file")
    file = os.open(place, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.pread(file, 8, 0) != mark.to_bytes(8, "little"):
            raise OSError(f"{place} has another mark")
        memory = mmap.mmap(file, 0)
    finally:
        os.close(file)
    memory.madvise(mmap.MADV_DONTFORK)  # a child would keep it alive
    return memory


def _here() -> int:
    """A number for this host, since it was started, its network, this user, and this helper: the same on ranks that
    fit together. Hosts that are emulated share a kernel, but no network."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        spaces = [os.readlink(f"/proc/thread-self/ns/{space}") for space in ("net", "pid")]
    except OSError:
        return secrets.randbits(62)
    helper = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()
    text = f"{host_name()} {boot} {spaces} {os.getuid()} {helper} {LANES}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], signed=True)


def _gathered(group: dist.ProcessGroup, values: Sequence[int]) -> list[list[int]]:
    """What every rank of the group passed, by position."""
    own = torch.tensor([int(value) for value in values], dtype=torch.int64)
    rows = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(rows, own, group=group)
    return [row.tolist() for row in rows]


def _close_all(files: Sequence[int]) -> None:
    for file in files:
        with suppress(OSError):
            os.close(file)


@cache
def _say_once(reason: str) -> None:
    _log.warning("ranks of one host reduce over Gloo, not through shared memory: %s", reason)


def _library() -> Any:
    library = _loaded()[0]
    assert library is not None
    return library


@cache
def _loaded() -> tuple[Any, str]:
    """The helper, or why it cannot be had."""
    if sys.platform != "linux":
        return None, f"it needs Linux, this is {sys.platform}"
    try:
        if Path("/proc/sys/vm/overcommit_memory").read_text(encoding="ascii").strip() == "2":
            return None, "vm.overcommit_memory is 2, so a page of it may be missing when it is used"
        library = ctypes.CDLL(str(build(_SOURCE)))
    except (OSError, WriteError, subprocess.SubprocessError) as error:
        return None, str(error)
    pointer, count, number, word = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_uint32
    message: list[Any] = [pointer, pointer, count, number]
    library.megabatch_hang_up.argtypes = [pointer, pointer, count, count]
    library.megabatch_reduce_scatter.argtypes = [*message, number, word]
    library.megabatch_all_gather.argtypes = [*message, word]
    library.megabatch_reduce.argtypes = [*message, number, number, word]
    library.megabatch_broadcast.argtypes = [*message, word]
    return library, ""
