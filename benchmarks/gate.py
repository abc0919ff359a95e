"""Start ranks of one machine at one moment, off the network: `StartGate`, and `local_ranks` to launch some.

A barrier through the network would start the ranks one latency apart and leave its own packets in the queues. The
ranks of these benchmarks share a machine and hence a clock, so they meet in a small shared file instead: each notes
that it has come, rank 0 notes the moment to start. The time of a collective is then the end of the slowest rank minus
that moment.
"""

from __future__ import annotations

import mmap
import multiprocessing as mp
import os
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["StartGate", "local_ranks", "make_gate_file"]

T = TypeVar("T")

_POLL_SECONDS = 0.002
_LEAD_SECONDS = 0.010  # all have seen the moment before it comes: several polls
_SLOT = struct.Struct("d")


def make_gate_file(path: Path, world_size: int) -> None:
    """An empty gate: one slot per rank for what it has reached, then the round and the moment of its start."""
    path.write_bytes(bytes(_SLOT.size * (world_size + 2)))


class StartGate:
    """One rank's view of the gate. Every rank calls `wait` equally often."""

    def __init__(self, path: Path, rank: int, world_size: int, timeout_seconds: float = 120.0) -> None:
        self._rank = rank
        self._world_size = world_size
        self._timeout_seconds = timeout_seconds
        self._round = 0.0
        with path.open("r+b") as file:
            self._slots = mmap.mmap(file.fileno(), 0)

    def wait(self) -> float:
        """Return at the agreed moment, and say which it was on the clock of `time.perf_counter`.

        Raises:
            TimeoutError: a rank did not come.
        """
        self._round += 1
        self._write(self._rank, self._round)
        if self._rank == 0:
            self._poll(lambda: all(self._read(rank) >= self._round for rank in range(self._world_size)))
            self._write(self._world_size + 1, time.perf_counter() + _LEAD_SECONDS)
            self._write(self._world_size, self._round)
        self._poll(lambda: self._read(self._world_size) >= self._round)
        start = self._read(self._world_size + 1)
        time.sleep(max(0.0, start - time.perf_counter()))
        return start

    def _poll(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        while not reached():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all ranks came to round {self._round:g} in {self._timeout_seconds:g} s")
            time.sleep(_POLL_SECONDS)

    def _read(self, slot: int) -> float:
        value: float = _SLOT.unpack_from(self._slots, slot * _SLOT.size)[0]
        return value

    def _write(self, slot: int, value: float) -> None:
        _SLOT.pack_into(self._slots, slot * _SLOT.size, value)


def local_ranks(world_size: int, fn: Callable[..., T], *args: Any, timeout_seconds: float) -> list[T]:
    """`[fn(rank, *args) for every rank]` in processes of this machine, with torchrun's variables set."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # The server that ranks are forked from may be shared with later laboratories, whose hosts have no names to look up.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    context = mp.get_context("forkserver")
    pool = ProcessPoolExecutor(world_size, mp_context=context)
    try:
        futures = [pool.submit(_local_rank, rank, world_size, port, fn, args) for rank in range(world_size)]
        return [future.result(timeout=timeout_seconds) for future in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _local_rank(rank: int, world_size: int, port: int, fn: Callable[..., T], args: tuple[Any, ...]) -> T:
    import torch

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    return fn(rank, *args)
