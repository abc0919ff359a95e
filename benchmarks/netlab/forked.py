"""`fork_ranks`: call a Python function on every rank without starting sixteen interpreters.

A fork server imports torch once; each rank is forked from it, moves into its station while it still has a single
thread, and only then calls the function. On two cores sixteen ranks are up in two or three seconds instead of about
thirty.
"""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import multiprocessing.forkserver
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from megabatch.errors import CommunicationError

from .namespaces import enter_paths
from .ranks import DEFAULT_ENVIRONMENT

__all__ = ["fork_ranks"]

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1
_GRACE_SECONDS = 5.0

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "torch.nn.parallel", "numpy"])


def fork_ranks(
    places: Sequence[tuple[str, str]],
    environments: Sequence[Mapping[str, str]],
    fn: Callable[..., T],
    args: tuple[Any, ...],
    timeout_seconds: float,
) -> list[T]:
    """Return `[fn(rank, *args) for every rank]`; rank r runs in `places[r]` with `environments[r]` added."""
    _start_server()
    pipes: list[Connection] = []
    processes = []
    try:
        for rank, (place, environment) in enumerate(zip(places, environments, strict=True)):
            receiver, sender = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_rank_main, args=(rank, place, dict(environment), sender, fn, args), daemon=True
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        return _collect(pipes, timeout_seconds)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join(timeout=10)
        for pipe in pipes:
            pipe.close()


def _start_server() -> None:
    """Start the fork server, if none runs yet, with the ranks' defaults: torch reads them when it is imported."""
    missing = [name for name in DEFAULT_ENVIRONMENT if name not in os.environ]
    os.environ.update({name: DEFAULT_ENVIRONMENT[name] for name in missing})
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for name in missing:
            del os.environ[name]


def _collect(pipes: Sequence[Connection], timeout_seconds: float) -> list[Any]:
    ranks = {id(pipe): rank for rank, pipe in enumerate(pipes)}
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    open_pipes = list(pipes)
    deadline = time.monotonic() + timeout_seconds
    while open_pipes:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            failures.update({ranks[id(p)]: f"did not finish within {timeout_seconds:g} s" for p in open_pipes})
            break
        for pipe in wait(open_pipes, timeout=remaining):
            assert isinstance(pipe, Connection)
            open_pipes.remove(pipe)
            try:
                good, value = pipe.recv()
            except EOFError:
                good, value = False, "the process died without a word"
            (results if good else failures)[ranks[id(pipe)]] = value
        if failures:  # the others get a moment to say why
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    if failures:
        raise CommunicationError("\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures)))
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    rank: int,
    place: tuple[str, str],
    environment: Mapping[str, str],
    sender: Connection,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    try:
        # The fork server ends when the laboratory's process does; the kernel then ends the ranks.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        enter_paths(place)
        os.environ.update(environment)
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(1)
        sender.send((True, fn(rank, *args)))
    except BaseException:
        sender.send((False, traceback.format_exc()))
        os._exit(1)
