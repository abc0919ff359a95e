"""Starts local workers, starts them again when one dies, and decides how a worker ends.

A worker that dies takes its group down; the launcher starts the group again and the run goes on from its last
checkpoint. A mistake of the user is different: it will not go away by trying again, so the worker that finds one leaves
its message in a file, the launcher stops trying when it sees it, and the message is printed once.

Workers call a function with its arguments; torch's elastic launcher could do that too, but workers that it started with
a function wait for each other at their end and never leave after a signal.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType
from typing import NoReturn

from megabatch.errors import CommunicationError, LaunchError, MegabatchError
from megabatch.workers.error_file import ERROR_FILE_VARIABLE, leave_error_of
from megabatch.workers.meeting import listen_at
from megabatch.workers.stop import handling, heard_signals
from megabatch.workers.token import TOKEN_VARIABLE
from megabatch.workers.world import LAUNCHED_VARIABLE, World

STARTED_VARIABLE = "MEGABATCH_STARTED"  # when the launcher of an elastic run began, in seconds since 1970
REPLACES_VARIABLE = "MEGABATCH_REPLACES"  # set for a worker that takes the place of one that died

# A worker whose peer is gone says whom it misses and ends by itself; one that hangs is killed after this time.
_PATIENCE_SECONDS = 10.0
LEFT_EXIT_CODE = 3
"""Of a worker of an elastic run that was asked to leave: it is not replaced."""

_MAX_WORKERS = 1024
_SHORT_LIFE_SECONDS = 20.0  # of a worker that may never have made a step
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def start_workers(world_size: int, work: Callable[..., object], *args: object, max_restarts: int = 0) -> int:
    """Call `work(*args)` in `world_size` new processes; return 0, or the signal that ended it.

    `work` must be a function of a module. It finds its rank in the environment, as under torchrun. The first signal is
    passed on to the workers, which may finish what they do; a second one kills them.

    Raises:
        MegabatchError: the one-line error a worker left.
        LaunchError: when workers died more often than `max_restarts`.
    """
    check_count(world_size)
    with _launching() as launched:
        for attempt in range(max_restarts + 1):
            listener = listen_at("127.0.0.1", 0, local=True)
            assert listener is not None
            port = _port_of(listener)
            environment = {
                **launched.environment,
                TOKEN_VARIABLE: secrets.token_hex(32),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
            }
            of_ranks = [{**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
            workers = launched.start(of_ranks, work, args)
            held = _open_store(listener, port)
            failed = _first_failure(workers, launched.error_file)
            del held
            if launched.signals:
                return launched.signals[0]
            launched.raise_error()
            if failed is None:
                return 0
        assert failed is not None
        rank, code = failed
        raise _ended_badly(f"rank {rank} ended with {_how(code)}", max_restarts)


def start_elastic_workers(
    world_size: int,
    work: Callable[..., object],
    *args: object,
    max_restarts: int = 0,
    leave_on: Collection[signal.Signals] = (),
    started: float = 0.0,
) -> int:
    """Call `work(*args)` in new processes; one that dies is replaced, and the others are left alone.

    Returns 0, or the signal that ended it; SIGTERM when all workers left one by one. Workers that die soon after their
    start are replaced `max_restarts` times in a row. leave_on: signals that make all workers of this launcher leave
    the run; others stop the run. started: when the command began, if that was before this call, in seconds since 1970.

    Raises: as `start_workers`.
    """
    check_count(world_size)
    with _launching() as launched:
        # A worker leaves at SIGTERM; at SIGINT the run stops.
        launched.passed_as = lambda number: signal.SIGTERM if number in leave_on else signal.SIGINT
        environment = {**launched.environment, STARTED_VARIABLE: str(started or time.time())}
        running: dict[int, tuple[SpawnProcess, float]] = {}
        short_lives, over, has_finished = 0, False, False

        def start(count: int) -> None:
            for worker in launched.start([environment] * count, work, args):
                running[worker.sentinel] = worker, time.monotonic()

        start(world_size)
        while running:  # workers that die while another is handled stay here until it is their turn
            for sentinel in wait(list(running), timeout=1.0):
                assert isinstance(sentinel, int)
                worker, began = running.pop(sentinel)
                worker.join()
                launched.raise_error()
                has_finished = has_finished or worker.exitcode == 0
                over = has_finished or bool(launched.signals)
                if over or worker.exitcode == LEFT_EXIT_CODE:
                    continue
                short_lives = short_lives + 1 if time.monotonic() - began < _SHORT_LIFE_SECONDS else 0
                if short_lives > max_restarts:
                    raise _ended_badly(f"a worker ended with {_how(worker.exitcode or 0)}", max_restarts)
                environment[REPLACES_VARIABLE] = "1"
                start(1)
        if launched.signals:
            return launched.signals[0]
        return 0 if has_finished else signal.SIGTERM


def check_count(world_size: int) -> None:
    """Raise LaunchError for more local workers than any machine has."""
    if world_size > _MAX_WORKERS:
        raise LaunchError(f"--workers {world_size}; at most {_MAX_WORKERS:,} local workers can be started, give fewer")


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _ended_badly(what: str, max_restarts: int) -> LaunchError:
    return LaunchError(
        f"{what} and {max_restarts} restarts did not help; the run can go on from its last checkpoint with --resume"
    )


class _Launched:
    """Workers of a launcher, the signals that it got and passes on to them, and the file for their first error."""

    def __init__(self, error_file: Path) -> None:
        self.error_file = error_file
        self.environment = {LAUNCHED_VARIABLE: str(os.getpid()), ERROR_FILE_VARIABLE: str(error_file)}
        self.signals: list[int] = []
        self.passed_as: Callable[[int], int] = lambda number: number
        self._workers: list[SpawnProcess] = []

    def start(
        self, environments: list[dict[str, str]], work: Callable[..., object], args: tuple[object, ...]
    ) -> list[SpawnProcess]:
        """Start a worker in each of these environments."""
        spawn = multiprocessing.get_context("spawn")
        workers = [spawn.Process(target=_enter, args=(environment, work, args)) for environment in environments]
        self._workers += workers
        # Workers start with signals blocked, until they can handle them; ours wait until every worker has its pid.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            for worker in workers:
                worker.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        return workers

    def pass_on(self, number: int, _frame: FrameType | None) -> None:
        self.signals.append(number)
        for worker in self._workers:
            if worker.pid is not None and worker.is_alive():
                os.kill(worker.pid, self.passed_as(number) if len(self.signals) == 1 else signal.SIGKILL)

    def raise_error(self) -> None:
        """Raise the error that a worker left, if one did."""
        if self.error_file.is_file():
            raise MegabatchError(self.error_file.read_text(encoding="utf-8"))

    def kill(self) -> None:
        for worker in self._workers:
            if worker.is_alive():
                worker.kill()
                worker.join()


@contextmanager
def _launching() -> Iterator[_Launched]:
    """A launcher's block: signals go to the workers, and none of them is left at its end."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before a worker loads torch
    with tempfile.TemporaryDirectory(prefix="megabatch-") as scratch:
        launched = _Launched(Path(scratch) / "error")
        with handling(_SIGNALS, launched.pass_on):
            try:
                yield launched
            finally:
                launched.kill()


def _port_of(listener: int) -> int:
    with socket.socket(fileno=os.dup(listener)) as same:
        port: int = same.getsockname()[1]
        return port


def _open_store(listener: int, port: int) -> object:
    """The store at which the workers meet. Loading torch takes seconds; they do it at the same time."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener)


def _first_failure(workers: list[SpawnProcess], error_file: Path) -> tuple[int, int] | None:
    """Wait for the end of a group of workers; the rank that failed first and its exit code, or None."""
    failed: tuple[int, int] | None = None
    ranks = {worker.sentinel: rank for rank, worker in enumerate(workers)}
    while ranks:
        patience = 0.0 if error_file.is_file() else _PATIENCE_SECONDS
        ended = wait(list(ranks), timeout=None if failed is None else patience)
        if not ended:
            for rank in ranks.values():
                workers[rank].kill()
            continue
        for sentinel in ended:
            assert isinstance(sentinel, int)
            rank = ranks.pop(sentinel)
            workers[rank].join()
            code = workers[rank].exitcode
            if code and failed is None:
                failed = rank, code
    return failed


def _enter(environment: dict[str, str], work: Callable[..., object], args: tuple[object, ...]) -> None:
    """The first thing a worker does: end with its launcher, and end quietly on signals until it handles them itself."""
    _end_with_launcher(environment)
    for number in heard_signals(_SIGNALS):
        signal.signal(number, lambda number, _frame: os._exit(128 + number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    os.environ.update(environment)
    work(*args)


def run_as_worker(work: Callable[[], int], world: World, environ: Mapping[str, str], debug: bool = False) -> int:
    """Do the work of one worker; returns its exit code, or ends the process when another worker is gone."""
    _end_with_launcher(environ)
    try:
        return work()
    except CommunicationError as error:
        if debug:
            raise
        _end_for_restart(str(error))
    except MegabatchError as error:
        if debug:
            traceback.print_exc()
        if leave_error_of(error, world, environ):
            os._exit(2)  # other workers may wait in a collective: do not linger to say goodbye to them
        raise
    except Exception as error:
        if debug:
            raise
        from megabatch.comm.failures import is_lost_contact  # torch is loaded by now

        if is_lost_contact(error):
            _end_for_restart(f"rank {world.rank} of {world.size} lost its connection to another worker")
        if leave_error_of(error, world, environ):
            os._exit(2)
        raise


def _end_for_restart(reason: str) -> NoReturn:
    """Another worker is gone. Say so and end at once: an elastic launcher then starts the whole group again."""
    print(f"megabatch: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


def _end_with_launcher(environ: Mapping[str, str]) -> None:
    """Ask Linux to kill this process when the launcher of ours that started it dies, if there is one."""
    if LAUNCHED_VARIABLE not in environ or not sys.platform.startswith("linux"):
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG in <linux/prctl.h>
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != int(environ[LAUNCHED_VARIABLE]):  # it died before the request was in place
        os._exit(1)
