"""Starts local workers through torch's elastic launcher, and decides how a worker ends.

A worker that dies takes its group down; the launcher starts the group again and the run goes on from its last
checkpoint. A mistake of the user is different: it will not go away by trying again, so the worker that finds one leaves
its message in a file, restarted workers give up at once when they see it, and the message is printed once.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from megabatch.errors import CommunicationError, LaunchError, MegabatchError
from megabatch.train.world import World

__all__ = [
    "ERROR_FILE_VARIABLE",
    "LAUNCHED_VARIABLE",
    "error_was_left",
    "leave_error",
    "run_as_worker",
    "start_workers",
]

LAUNCHED_VARIABLE = "MEGABATCH_LAUNCHED"
ERROR_FILE_VARIABLE = "MEGABATCH_ERROR_FILE"

# How long workers may take to finish their step and write a checkpoint after a signal. One step can be hours of
# accumulation; whoever sent the signal has a limit of its own and kills when that is over.
_SHUTDOWN_SECONDS = 24 * 3600


def start_workers(world_size: int, work: Callable[..., object], *args: object, max_restarts: int = 0) -> int:
    """Call `work(*args)` in `world_size` new processes; return 0, or the signal that ended it.

    `work` must be a function of a module. It finds its rank in the environment, as under torchrun.

    Raises:
        MegabatchError: the one-line error a worker left.
        LaunchError: when workers died more often than `max_restarts`.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Its own reports are pages long; what the user needs to know is said here in one line. Each of its loggers has set
    # a level of its own when it was imported, so the common parent does not decide.
    for name in logging.root.manager.loggerDict:
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="megabatch-") as scratch:
        error_file = Path(scratch) / "error"
        os.environ[LAUNCHED_VARIABLE] = "1"
        os.environ[ERROR_FILE_VARIABLE] = str(error_file)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world_size,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=max_restarts,
            monitor_interval=0.1,
            signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
            shutdown_timeout=_SHUTDOWN_SECONDS,
        )
        try:
            elastic_launch(launch, work)(*args)
        except SignalException as stop:
            return int(stop.sigval)
        except ChildFailedError as failure:
            _raise_left_error(error_file)
            rank, first = failure.get_first_failure()
            how = signal.Signals(-first.exitcode).name if first.exitcode < 0 else f"exit code {first.exitcode}"
            raise LaunchError(
                f"worker {rank} ended with {how} and {max_restarts} restarts did not help; "
                "the run can go on from its last checkpoint with --resume"
            ) from None
        _raise_left_error(error_file)
    return 0


def _raise_left_error(error_file: Path) -> None:
    if error_file.is_file():
        raise MegabatchError(error_file.read_text(encoding="utf-8"))


def error_was_left(environ: Mapping[str, str]) -> bool:
    """Whether some worker has already met a user's error."""
    return ERROR_FILE_VARIABLE in environ and Path(environ[ERROR_FILE_VARIABLE]).exists()


def leave_error(message: str, environ: Mapping[str, str]) -> bool:
    """In a worker: put the user's error where the launcher finds it; False when no launcher of ours is waiting."""
    path = environ.get(ERROR_FILE_VARIABLE)
    if path is None:
        return False
    beside = Path(f"{path}.{os.getpid()}")
    try:
        beside.write_text(message, encoding="utf-8")
        os.link(beside, path)  # whole or not at all; the first worker to find an error is the one to tell
    except OSError:
        pass
    finally:
        beside.unlink(missing_ok=True)
    return True


def run_as_worker(work: Callable[[], int], world: World, environ: Mapping[str, str], debug: bool = False) -> int:
    """Do the work of one worker; returns its exit code, or ends the process when another worker is gone."""
    if LAUNCHED_VARIABLE in environ:
        _end_with_parent()
        if error_was_left(environ):
            # An earlier attempt met a mistake that trying again does not fix. Success ends the attempts; the launcher
            # then tells the mistake.
            return 0
    try:
        return work()
    except CommunicationError as error:
        if debug:
            raise
        _end_for_restart(str(error))
    except MegabatchError as error:
        if debug:
            traceback.print_exc()
        if leave_error(str(error), environ):
            os._exit(2)  # other workers may wait in a collective: do not linger to say goodbye to them
        raise
    except Exception as error:
        if debug:
            raise
        if _is_lost_contact(error):
            _end_for_restart(f"worker {world.rank} of {world.size} lost its connection to another worker")
        # A bug, here or in the user's model: it would come again, so it is told once and nothing is tried again.
        first_line = str(error).strip().split("\n")[0]
        if leave_error(f"worker {world.rank} met {type(error).__name__}: {first_line}", environ):
            traceback.print_exc()
            os._exit(2)
        raise


def _end_for_restart(reason: str) -> NoReturn:
    """Another worker is gone. Say so and end at once: an elastic launcher then starts the whole group again."""
    print(f"megabatch: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


def _is_lost_contact(error: Exception) -> bool:
    import torch
    import torch.distributed as dist

    # A device that fails is worth another try too. Gloo has no error class of its own; its messages begin with the
    # path of its source file.
    known = isinstance(error, (dist.DistError, torch.AcceleratorError))
    return known or (isinstance(error, RuntimeError) and "gloo" in str(error).split("]")[0])


def _end_with_parent() -> None:
    """Ask Linux to kill this process when its launcher dies, so that no worker outlives a killed launcher."""
    if not sys.platform.startswith("linux"):
        return
    launcher = os.getppid()
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG in <linux/prctl.h>
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before the request was in place
        os.kill(os.getpid(), signal.SIGKILL)
