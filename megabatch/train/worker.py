"""How a worker ends: done, with a user's error told once, or so that an elastic launcher starts the group again."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import NoReturn

from megabatch.errors import CommunicationError, MegabatchError
from megabatch.train.launch import LAUNCHED_VARIABLE, error_was_left, leave_error
from megabatch.train.stop import end_with_parent
from megabatch.train.world import World

__all__ = ["run_as_worker"]


def run_as_worker(work: Callable[[], int], world: World, environ: Mapping[str, str], debug: bool = False) -> int:
    """Do the work of one worker; returns its exit code, or ends the process when another worker is gone."""
    if LAUNCHED_VARIABLE in environ:
        end_with_parent()
        if error_was_left(environ):
            # An earlier attempt met a mistake that trying again does not mend. Success ends the attempts; the launcher
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
