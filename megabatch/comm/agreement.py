"""Do all ranks mean the same message? Asked once per new kind of message, at the price of two small hops.

Ranks that built different models reduce buckets of different sizes. Left alone, Gloo would end the process and
NCCL would hang. So each rank turns what it is about to reduce into a number d; the greatest d and the greatest
-d over the grid are opposite exactly when all are equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from megabatch.comm.grid import ProcessGrid, uses_gloo
from megabatch.comm.link import MAX_ACTIONS, Link, Scratch, message_tag
from megabatch.comm.primitives import exchange_maximum
from megabatch.comm.rollcall import Note, in_words

__all__ = ["check_agreement"]

_PHASE = "agreement on the message"


def check_agreement(
    grid: ProcessGrid, *, call: int, task: str, message: str, digest_of: str, device: torch.device
) -> None:
    """Return when every rank passed the same `digest_of` for this call.

    task and message are for people: "bucket 3", "1000 float32".

    Raises:
        CommunicationError: on every rank, saying who has what, when one differs; or when a rank does not answer.
    """
    digest = int.from_bytes(hashlib.blake2b(digest_of.encode(), digest_size=7).digest())
    extremes = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
    axes = [axis for axis, size in enumerate(grid.shape.sizes) if size > 1]
    if device.type == "cpu" and all(uses_gloo(grid.group(axis)) for axis in axes):
        _exchange(grid, axes, extremes, call, partial(Note, grid.rank, task, _PHASE, call, message))
    else:
        for axis in axes:
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=grid.group(axis))
    greatest, opposite = extremes.tolist()
    if greatest != -opposite:
        raise grid.fail(Note(grid.rank, task, _PHASE, call, message, None, "workers disagree"))


def _exchange(
    grid: ProcessGrid, axes: Sequence[int], extremes: torch.Tensor, call: int, note: Callable[..., Note]
) -> None:
    """Take the maximum along each axis in turn, with all receives posted first."""
    scratch = Scratch()
    scratch.reset(extremes.dtype)
    tag = message_tag(call, "", action=MAX_ACTIONS - 1)
    links = [
        Link(grid.group(axis), grid.axis_ranks(axis), grid.axis_position(axis), grid.timeout_seconds) for axis in axes
    ]
    runs = [exchange_maximum(link, extremes, tag, scratch, 1) for link in links]
    try:
        for run in runs:
            next(run)
        for run in runs:
            next(run)
    except RuntimeError as error:
        # Links are used in turn: the last one that waited for anybody is the one that failed.
        waiting_for = next((link.waiting_for for link in reversed(links) if link.waiting_for is not None), None)
        cause = in_words(error, waiting_for, grid.timeout_seconds)
        raise grid.fail(note(silent_peer=waiting_for, cause=cause)) from error
