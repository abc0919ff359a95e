"""The file in which a worker leaves an error that would come again, for the launcher that has started it.

A launcher that finds it does not start the workers again, and tells the error once. A lost worker or a device that
failed is worth another try, so nothing is left for them.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from megabatch.errors import CommunicationError, MegabatchError, WriteError, first_line
from megabatch.files import write_once
from megabatch.workers.world import World

ERROR_FILE_VARIABLE = "MEGABATCH_ERROR_FILE"

_printed: BaseException | None = None  # the bug whose traceback this process has shown


def leave_error(message: str, environ: Mapping[str, str]) -> bool:
    """In a worker: put the user's error where the launcher finds it; False when no launcher of ours is waiting."""
    path = environ.get(ERROR_FILE_VARIABLE)
    if path is None:
        return False
    with suppress(WriteError):
        write_once(Path(path), message)  # the first worker to find an error is the one to tell
    return True


def leave_error_of(error: BaseException, world: World, environ: Mapping[str, str]) -> bool:
    """In a worker: leave the text of an error that would come again, and print the traceback of a bug once.

    False when no launcher of ours is waiting, or when the error is worth another try. It may be called again.
    """
    global _printed
    if isinstance(error, MegabatchError):
        return not isinstance(error, CommunicationError) and leave_error(str(error), environ)
    from megabatch.comm.failures import is_lost_contact  # torch is loaded by now

    if not isinstance(error, Exception) or is_lost_contact(error):
        return False
    # A bug, here or in the user's model.
    is_left = leave_error(f"rank {world.rank} met {first_line(error)}", environ)
    if is_left and error is not _printed:
        traceback.print_exception(error)
        _printed = error
    return is_left
