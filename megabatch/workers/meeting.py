"""Where the workers of a world meet: the store, the number of the attempt, the process group.

torch's store and Gloo know no passwords. So they listen at the address they need and no other, and the keys in the
store are derived from the token of the run.
"""

from __future__ import annotations

import errno
import ipaddress
import itertools
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from megabatch.errors import LaunchError, first_line
from megabatch.workers.error_file import leave_error_of
from megabatch.workers.heartbeat import error_text, heartbeat, rank_text
from megabatch.workers.token import TOKEN_VARIABLE, run_token, sign
from megabatch.workers.world import ALONE, World

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

_POLL_SECONDS = 0.02
_ABORT_SECONDS = 10.0

_joins = itertools.count()


class Meeting(NamedTuple):
    """What the ranks have in common once they have joined."""

    world: World  # with the attempt that they agreed on
    store: Store  # for this run alone, over all of its attempts
    token: bytes  # of the run; empty when it has none


@contextmanager
def join(world: World, backend: str, timeout_seconds: float, device: torch.device | None = None) -> Iterator[Meeting]:
    """Meet the other workers, make the default process group, yield what they share; leave at the end.

    device: this worker's, as `choose_device` gave it; NCCL needs it. Leaving waits for the threads of the group, see
    `megabatch.comm.interpreter_exit`.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

    from megabatch.comm.device import check_devices
    from megabatch.comm.interpreter_exit import end_threads, hold_default_group  # before the group is made
    from megabatch.comm.p2p import group_timeout

    timeout = timedelta(seconds=timeout_seconds)
    token = run_token(os.environ) or b""
    ended_well, unsaid = False, ""
    with _gloo_on_loopback() if world.is_local else nullcontext():
        try:
            store: Store = HashStore()
            if world != ALONE:
                is_master = world.is_main and not world.store_is_hosted
                listener = listen_at(world.meeting_host, world.meeting_port, world.is_local) if is_master else None
                store = TCPStore(
                    world.meeting_host,
                    world.meeting_port,
                    is_master=is_master,
                    timeout=timeout,
                    master_listen_fd=listener,
                )
            # A second run in the same processes must not find what the first one left.
            own = PrefixStore(sign(token, f"run {next(_joins)}"), store)
            attempt = _agree_on_attempt(own, world, timeout_seconds)
            # torchrun keeps one store over all restarts; without a prefix of its own a restarted Gloo worker finds the
            # addresses of workers that no longer exist and cannot connect.
            prefixed = PrefixStore(f"attempt-{attempt}", own)
            if backend == "nccl":
                assert device is not None, "NCCL needs to know the device of this worker"
                check_devices(prefixed, world.rank, world.size, device, timeout)
            dist.init_process_group(
                backend,
                store=prefixed,
                rank=world.rank,
                world_size=world.size,
                timeout=group_timeout(backend, timeout_seconds),
                device_id=device if backend == "nccl" else None,
            )
            beating: AbstractContextManager[None] = nullcontext()
            if backend == "nccl" and world.size > 1:
                beating = heartbeat(PrefixStore("heartbeat", prefixed), world, timeout_seconds)
        except (RuntimeError, ValueError, OSError) as error:
            where = f"{world.meeting_host}:{world.meeting_port}"
            raise LaunchError(
                f"rank {world.rank} of {world.size} could not join the others at {where} within {timeout_seconds:g} s "
                f"({first_line(error)}); check that every worker was started, can reach that address and has "
                f"the same {TOKEN_VARIABLE}"
            ) from error
        hold_default_group()
        try:
            with beating:
                yield Meeting(replace(world, attempt=attempt), own, token)
            ended_well = True
        except BaseException as error:
            if backend == "nccl":  # what follows may not come to its end
                unsaid = f"{rank_text(world)} ends: {error_text(error)}"
                if world.size > 1:  # else nobody else ends with it, and who catches the error tells it
                    _say(unsaid)
                    unsaid = ""
                leave_error_of(error, world, os.environ)
            raise
        finally:
            leave(ended_well, unsaid)
            if ended_well:  # else another worker may be gone, and waiting for threads that wait for it takes long
                end_threads()


def leave(ended_well: bool, unsaid: str = "") -> None:
    """End all process groups. After an error NCCL's are aborted: the device may wait for another rank for ever, and
    destroying a group waits for the device. Should aborting take long, the process says what is unsaid and ends."""
    import torch.distributed as dist

    def give_up() -> None:
        if unsaid:
            _say(unsaid)
        os._exit(1)

    if not ended_well and dist.get_backend() == "nccl":
        limit = threading.Timer(_ABORT_SECONDS, give_up)
        limit.daemon = True
        limit.start()
        dist.distributed_c10d._abort_process_group()
        limit.cancel()
    else:
        dist.destroy_process_group()


def _say(text: str) -> None:
    print(f"megabatch: {text}", file=sys.stderr, flush=True)


def _agree_on_attempt(store: Store, world: World, timeout_seconds: float) -> int:
    """The number of this attempt, the same on every rank and larger than that of all earlier ones.

    An agent of torchrun counts only the restarts that its own workers caused, so hosts may count differently. The main
    rank takes the next number and tells it to every rank that says hello. What the dead left in the store does no
    harm: an answer belongs to one hello, and the main rank is done when all have confirmed its own number.
    """
    if not world.is_main:
        hello = secrets.token_hex(16)
        store.set(f"hello {world.rank}", hello)
        attempt = int(store.get(f"answer {hello}"))
        store.set(f"confirmed {attempt} {world.rank}", "")
        return attempt
    number = store.add("attempts", 1)
    if number <= world.attempt:  # the store is younger than the run
        number = store.add("attempts", world.attempt + 1 - number)
    deadline = time.monotonic() + timeout_seconds
    answered = dict.fromkeys(range(1, world.size), "")
    while answered:
        for rank in list(answered):
            if store.check([f"confirmed {number - 1} {rank}"]):
                del answered[rank]
            elif store.check([f"hello {rank}"]) and (hello := store.get(f"hello {rank}").decode()) != answered[rank]:
                store.set(f"answer {hello}", str(number - 1))
                answered[rank] = hello
        if time.monotonic() > deadline:
            raise RuntimeError(f"no word from rank {min(answered)}")
        time.sleep(_POLL_SECONDS if answered else 0)
    return number - 1


def listen_at(host: str, port: int, local: bool) -> int | None:
    """A listening socket at the address of `host`, for a store; None when the store must listen at all addresses.

    A store of torch would listen at all of them. It must where this host does not know under which address the others
    reach it: its name may stand for the loopback address here, and for an address of a gateway.

    Raises:
        OSError: the port is taken.
    """
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback and not local:
            continue
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRNOTAVAIL:
                continue
            raise
        return listener.detach()
    return None


@contextmanager
def _gloo_on_loopback() -> Iterator[None]:
    """Let Gloo listen at the loopback address alone, unless the user has named a network interface."""
    name = "GLOO_SOCKET_IFNAME"
    loopback = next((interface for _, interface in socket.if_nameindex() if interface in ("lo", "lo0")), None)
    if name in os.environ or loopback is None:
        yield
        return
    os.environ[name] = loopback
    try:
        yield
    finally:
        os.environ.pop(name, None)
