"""`run_ranks(n, fn)`: start n real Gloo ranks, each calling `fn(rank, *args)`, and collect what they return.

Ranks are forked from a server process that has already imported torch, so a four-rank test costs a fraction of a
second instead of four interpreter starts. A rank that raises, dies or hangs fails the test with its own traceback.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_context = mp.get_context("forkserver")
# Whatever a rank would import anyway is imported once, before forking; only modules that start no threads may be here.
_context.set_forkserver_preload(["torch", "torch._dynamo", "torch.utils.tensorboard", "megabatch.train.trainer"])


class RankFailureError(AssertionError):
    """At least one rank raised, died or did not finish in time."""


def run_ranks(
    world_size: int,
    fn: Callable[..., T],
    *args: Any,
    timeout_seconds: float = 120.0,
    group_timeout_seconds: float = 60.0,
) -> list[T]:
    """Return `[fn(rank, *args) for every rank]`, run in `world_size` processes joined by a Gloo process group.

    `fn` and `args` must be picklable; `fn` is a module-level function.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        store = str(Path(folder) / "store")
        pipes: list[Connection] = []
        processes = []
        for rank in range(world_size):
            receiver, sender = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_rank_main,
                args=(rank, world_size, store, group_timeout_seconds, sender, fn, args),
                daemon=True,
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, timeout_seconds)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join(timeout=10)


def _collect(pipes: list[Connection], timeout_seconds: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = {id(pipe): rank for rank, pipe in enumerate(pipes)}
    open_pipes = list(pipes)
    deadline = time.monotonic() + timeout_seconds
    while open_pipes:
        remaining = deadline - time.monotonic()
        ready = wait(open_pipes, timeout=max(0.0, min(remaining, 1.0)))
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting[id(pipe)]
            open_pipes.remove(pipe)
            try:
                good, value = pipe.recv()
            except EOFError:
                failures[rank] = "the process died without a word"
                continue
            if good:
                results[rank] = value
            else:
                failures[rank] = value
        if failures and remaining > 10:
            deadline = time.monotonic() + 10  # one rank failed: the others get a moment to say why
        if remaining <= 0:
            for pipe in open_pipes:
                failures.setdefault(waiting[id(pipe)], f"did not finish within {timeout_seconds:g} s")
            break
    if failures:
        raise RankFailureError("\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures)))
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    rank: int,
    world_size: int,
    store: str,
    group_timeout_seconds: float,
    sender: Connection,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=group_timeout_seconds),
        )
        sender.send((True, fn(rank, *args)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        sender.send((False, traceback.format_exc()))
        os._exit(1)
