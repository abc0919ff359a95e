"""Lets the threads of a process group end before the interpreter does.

A thread of Gloo needs the interpreter to let go of the tensors it sent. One that is caught at that when the interpreter
goes down aborts the process ("terminate called without an active exception"), seen in one of 25 runs of a plain DDP
loop on a busy machine. A group waits for its threads when nothing holds it any more. DDP holds it, in a reference cycle
that outlives `destroy_process_group`, so the cycle is collected while the interpreter still stands.

DDP's reducer must not be the last holder: it waits for the threads without letting go of the interpreter, which they
need, and the process hangs (seen in one of five runs of a plain loop, with torch alone). A group that Python lets go of
waits as it should. So a group that was used is held here until the reducers are gone.

Import this module before the process group is made.
"""

from __future__ import annotations

import atexit
import gc

import torch.distributed as dist

# The functions of that module have the default group of the moment of its import as default argument. Whatever torch
# imports it later, such as the first step of an optimizer, would hold the group for ever.
import torch.distributed.nn.functional  # noqa: F401

_held: set[dist.ProcessGroup] = set()


def hold_default_group() -> None:
    """Keep the default process group of now until `end_threads`."""
    group = dist.group.WORLD
    if group is not None:
        _held.add(group)


@atexit.register
def end_threads() -> None:
    """Free the DDP modules that nothing uses any more, then the groups, which wait for their threads."""
    # After an error the traceback still holds everything: then nobody waits for threads that wait for a lost worker.
    gc.collect()
    _held.clear()
