"""Agreeing on the layout of a grid: every rank tells its shape and host, rank 0 decides, everybody reads the
decision.

Through the job's key-value store, so it works before any communicator exists and costs one write and one read
per rank. Ranks that were given different shapes, or do not come, end everywhere with the same one-line
reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from datetime import timedelta

from torch._C._distributed_c10d import Store

from megabatch.comm.shape import near_square, rows_by_host
from megabatch.errors import GridError, LaunchError

__all__ = ["agree_on_grid", "host_name"]

RANK_0_GRACE_SECONDS = 10.0


def agree_on_grid(
    store: Store, rank: int, world_size: int, shape_text: str, host: str, timeout_seconds: float
) -> tuple[tuple[str, ...], str, str]:
    """(host by rank, shape, why): rank 0 collects each rank's shape and host, decides, and tells everybody.

    An empty `shape_text` on all ranks lets rank 0 choose.

    Raises:
        GridError: ranks gave different shapes. LaunchError: ranks did not come within the timeout.
    """
    store.set(f"entry {rank}", json.dumps([shape_text, host]))
    if rank == 0:
        store.set("verdict", json.dumps(_verdict(store, world_size, timeout_seconds)))
    # Rank 0 needs its whole timeout to find out who is missing; only then can it say so.
    verdict = _get(store, "verdict", timeout_seconds + RANK_0_GRACE_SECONDS)
    if verdict is None:
        raise LaunchError(
            f"rank 0 did not say within {timeout_seconds:g} s how the grid lies; look at the log of rank 0"
        )
    decided = json.loads(verdict)
    if "missing" in decided:
        raise LaunchError(decided["missing"])
    if "differs" in decided:
        raise GridError(decided["differs"])
    return tuple(decided["hosts"]), decided["shape"], decided["reason"]


def host_name() -> str:
    """Name of this host; `MEGABATCH_HOST` overrides it where hosts share a name, as network namespaces do."""
    return os.environ.get("MEGABATCH_HOST") or socket.gethostname()


def _verdict(store: Store, world_size: int, timeout_seconds: float) -> dict[str, object]:
    """Rank 0's decision, or why there is none."""
    keys = [f"entry {rank}" for rank in range(world_size)]
    with contextlib.suppress(RuntimeError):
        store.wait(keys, timedelta(seconds=timeout_seconds))
    missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
    if missing:
        return {
            "missing": f"no grid: rank {', '.join(missing[:8])} did not come within {timeout_seconds:g} s; "
            "look at its log"
        }
    entries = [tuple(json.loads(value)) for value in store.multi_get(keys)]
    hosts = [host for _, host in entries]
    by_shape: dict[str, list[str]] = {}
    for rank, (text, _) in enumerate(entries):
        by_shape.setdefault(text or "none", []).append(str(rank))
    if len(by_shape) > 1:
        told = "; ".join(f"{text} on rank {', '.join(ranks[:8])}" for text, ranks in by_shape.items())
        return {"differs": f"grid shapes differ between workers ({told}); give every worker the same shape"}
    if entries[0][0]:
        return {"hosts": hosts, "shape": entries[0][0], "reason": "as given"}
    by_host = rows_by_host(hosts)
    shape = by_host or near_square(world_size)
    reason = "one host per row" if by_host else "near square: hosts give no rows of equal length"
    return {"hosts": hosts, "shape": shape.text, "reason": reason}


def _get(store: Store, key: str, timeout_seconds: float) -> bytes | None:
    try:
        store.wait([key], timedelta(seconds=timeout_seconds))
    except RuntimeError:
        return None
    return store.get(key)
