"""All-reduce of any contiguous float tensor over a process grid, by any algorithm of `phases`.

    grid = ProcessGrid.build("2x4")
    all_reduce(tensor, grid, algorithm="torus", average=True)

Every element of the result is computed by one rank and copied to the others (`exchange`: computed by all in
the same order), so all ranks agree bit for bit, and a repetition gives the same bits. Against another
algorithm the result may differ in rounding, because the order of summation differs.

Lengths need not divide by anything: on Gloo chunks differ by one element; for the backend's own collectives,
which need equal chunks, the message passes through a padded buffer that is kept for the next call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megabatch.comm.grid import ProcessGrid, uses_gloo
from megabatch.comm.lane import Lane, Passage, PhaseFailedError, Turn
from megabatch.comm.link import kept_tag, message_tag
from megabatch.comm.phases import Division, divisions, num_lanes, phases, staggered, torus_form
from megabatch.comm.price import DEFAULT_SEGMENT_BYTES
from megabatch.comm.primitives import split
from megabatch.comm.rollcall import Note, in_words
from megabatch.comm.worker import Workers
from megabatch.errors import ConfigError

if TYPE_CHECKING:
    from megabatch.comm.auto import AutoReducer
    from megabatch.comm.calibration import Calibration

__all__ = ["DEFAULT_SEGMENT_BYTES", "AllReducer", "all_reduce", "make_reducer", "message_text"]

KEPT_BYTES = 256 * 1024
"""Shorter messages pass through a kept buffer whose receives are posted before the next call begins."""

_MAX_KEPT = 16
_WHOLE = 2**62
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HALVES = (torch.float16, torch.bfloat16)


class AllReducer:
    """Runs one algorithm on a grid again and again, keeping its buffers. Used by one thread at a time.

    average: divide by the number of ranks (see `divisions` for where).
    grad_dtype: send float16 or bfloat16 instead of the tensor's own type. The tensor is rounded to it once,
        sums are rounded as `primitives` says, and the result is widened again: every rank holds equal values.
    segment_bytes: larger chunks travel in pieces of about this size, so a hop begins before the last ends.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        algorithm: str = "torus",
        *,
        average: bool = False,
        grad_dtype: torch.dtype | None = None,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
    ) -> None:
        if segment_bytes < 1:
            raise ConfigError(f"segment of {segment_bytes} bytes; give at least 1, or leave it at the default")
        if grad_dtype not in (None, *_FLOATS):
            raise ConfigError(f"wire type {grad_dtype}; choose float16, bfloat16 or none for the tensor's own")
        self.grid = grid
        self.algorithm = algorithm
        self.phases = phases(algorithm, grid.shape)
        self.average = average
        self.grad_dtype = grad_dtype
        self._segment_bytes = segment_bytes
        self._lanes: dict[tuple[object, ...], list[Lane]] = {}
        self._kept: dict[tuple[int, torch.dtype], _Kept] = {}
        self._threads: Workers | None = None
        self._num_threads = 0
        self._staging: torch.Tensor | None = None
        self._separate_links = grid.separate_links
        self._all_gloo = all(uses_gloo(grid.group(phase.axis)) for phase in self.phases)

    @property
    def algorithms(self) -> frozenset[str]:
        """The algorithms in use: this one."""
        return frozenset([self.algorithm])

    def run(
        self, tensor: torch.Tensor, *, task: str = "all-reduce", call: int | None = None
    ) -> list[tuple[str, float]]:
        """Sum or average `tensor` over the grid in place; return (phase, seconds) as this rank saw them.

        task names the work in error messages ("bucket 3"). call is `grid.next_call()` taken when the work was
        queued; all ranks must take their calls in the same order.

        Raises:
            CommunicationError: a rank died, did not answer in time, or reduces something else.
            ConfigError: a tensor that cannot be reduced in place.
        """
        flat = _checked(tensor)
        self.grid.check_usable()
        call = self.grid.next_call() if call is None else call
        if not flat.numel() or not self.phases:
            return []
        own_primitives = self._all_gloo and flat.device.type == "cpu"
        kept = self._kept_for(flat, call, task) if own_primitives else None
        message = kept.message if kept else self._message(flat, own_primitives)
        lanes = kept.lanes if kept else self._lanes_for(message, own_primitives)
        if message is not flat:
            _fill(message, flat, lanes)
        jobs: list[Callable[[], list[tuple[str, float]]]] = []
        if kept:
            jobs += [partial(passage.run, divide_first=False) for passage in kept.passages]
        else:
            tag = message_tag(call, self._kind(flat, message.dtype))
            turn: Turn | None = None
            for lane, part in zip(lanes, split(message, len(lanes)), strict=True):
                turn = Turn(turn) if lane.segment_bytes == _WHOLE else None
                jobs.append(partial(lane.run, part, tag, divide_first=message is flat, turn=turn))
        told = [partial(self._explained, job, call, task, flat) for job in jobs]
        seconds = self._run_together(told) if own_primitives else [mark for job in told for mark in job()]
        if message is not flat:
            flat.copy_(message[: flat.numel()])
        if kept:
            self._post_ahead(kept)
        return seconds

    def _explained(
        self, job: Callable[[], list[tuple[str, float]]], call: int, task: str, tensor: torch.Tensor
    ) -> list[tuple[str, float]]:
        """Run a job; when it breaks, give the grid up and say who is missing."""
        try:
            return job()
        except PhaseFailedError as error:
            cause = in_words(error.cause, error.peer, self.grid.timeout_seconds)
            note = Note(self.grid.rank, task, error.phase, call, message_text(tensor), error.peer, cause)
            raise self.grid.fail(note) from error

    def _kind(self, flat: torch.Tensor, dtype: torch.dtype) -> str:
        return f"{flat.numel()} {dtype} {self.algorithm}"

    def _kept_for(self, flat: torch.Tensor, call: int, task: str) -> _Kept | None:
        """The kept passage for messages like this, made on their first call; None for those that are not kept.

        All ranks make and use them in the same order of calls, so they decide alike.
        """
        dtype = self.grad_dtype or flat.dtype
        key = (flat.numel(), dtype)
        if key in self._kept:
            return self._kept[key]
        if flat.numel() * dtype.itemsize > KEPT_BYTES or len(self._kept) >= _MAX_KEPT or self.algorithm == "backend":
            return None
        tag = kept_tag(call, self._kind(flat, dtype))
        taken = self.grid.kept.setdefault("kept tags", set())
        if tag in taken:  # by one that may still have receives posted
            return None
        taken.add(tag)
        message = torch.empty(flat.numel(), dtype=dtype)
        lanes = self._new_lanes(message, True)
        parts = zip(lanes, split(message, len(lanes)), strict=True)
        kept = self._kept[key] = _Kept(key, message, lanes, [Passage(lane, part, tag) for lane, part in parts])
        self._explained(kept.post, call, task, flat)
        return kept

    def _post_ahead(self, kept: _Kept) -> None:
        """Post the receives of the next call. A peer that is gone is the next call's trouble, if there is one."""
        try:
            kept.post()
        except PhaseFailedError:
            del self._kept[kept.key]

    def _run_together(self, jobs: Sequence[Callable[[], list[tuple[str, float]]]]) -> list[tuple[str, float]]:
        """Run the first lane here, the others beside it; one that fails hangs up and frees the rest."""
        if self._num_threads < len(jobs) - 1:
            if self._threads is not None:
                self._threads.stop(0)
            self._num_threads = len(jobs) - 1
            self._threads = Workers("megabatch-lane", self._num_threads)
        others = [self._threads.submit(job) for job in jobs[1:]] if self._threads else []
        seconds = jobs[0]()
        for other in others:
            seconds += other.result()
        return seconds

    def _message(self, flat: torch.Tensor, own_primitives: bool) -> torch.Tensor:
        """The tensor itself, or a kept buffer of the wire type, padded where chunks must be equal."""
        dtype = self.grad_dtype or flat.dtype
        numel = flat.numel()
        if not own_primitives:
            parts = self.grid.world_size * num_lanes(self.phases)
            numel = -(-numel // parts) * parts
        if dtype == flat.dtype and numel == flat.numel():
            return flat
        kept = self._staging
        if kept is None or kept.numel() < numel or kept.dtype != dtype or kept.device != flat.device:
            kept = self._staging = torch.empty(numel, dtype=dtype, device=flat.device)
        return kept[:numel]

    def _lanes_for(self, message: torch.Tensor, own_primitives: bool) -> list[Lane]:
        form = torus_form(message.nbytes, separate_links=self._separate_links) if own_primitives else ()
        key = (message.dtype in _HALVES, own_primitives, form)
        if key not in self._lanes:
            self._lanes[key] = self._new_lanes(message, own_primitives)
        return self._lanes[key]

    def _new_lanes(self, message: torch.Tensor, own_primitives: bool) -> list[Lane]:
        phase_list = self.phases
        if own_primitives:
            phase_list = phases(self.algorithm, self.grid.shape, message.nbytes, separate_links=self._separate_links)
        # Staggered lanes fill each other's gaps; smaller pieces would only be more messages.
        segment_bytes = _WHOLE if staggered(phase_list) else self._segment_bytes
        divided = [Division()] * len(phase_list)
        if self.average:
            divided = list(divisions(phase_list, half_precision=message.dtype in _HALVES))
        lanes: list[Lane] = []
        for number in range(num_lanes(phase_list)):
            chosen = [index for index, phase in enumerate(phase_list) if phase.lane == number]
            lanes.append(
                Lane(
                    self.grid,
                    [phase_list[index] for index in chosen],
                    [divided[index] for index in chosen],
                    first_action=lanes[-1].end_action if lanes else 0,
                    segment_bytes=segment_bytes,
                    own_primitives=own_primitives,
                )
            )
        return lanes


@dataclass(frozen=True, slots=True)
class _Kept:
    """Messages of one length and type: the buffer they pass through, and their way through each lane."""

    key: tuple[int, torch.dtype]
    message: torch.Tensor
    lanes: list[Lane]
    passages: list[Passage]

    def post(self) -> list[tuple[str, float]]:
        for passage in self.passages:
            passage.post()
        return []


def all_reduce(
    tensor: torch.Tensor,
    grid: ProcessGrid,
    algorithm: str = "torus",
    *,
    average: bool = False,
    grad_dtype: torch.dtype | None = None,
    segment_bytes: int = DEFAULT_SEGMENT_BYTES,
) -> None:
    """Sum (or average) `tensor` over all ranks of `grid`, in place; all ranks must call it in the same order.

    Buffers are kept with the grid. See `AllReducer` for the options and `AllReducer.run` for the errors.
    """
    options = (algorithm, average, grad_dtype, segment_bytes)
    if options not in grid.kept:
        grid.kept[options] = make_reducer(
            grid, algorithm, average=average, grad_dtype=grad_dtype, segment_bytes=segment_bytes
        )
    grid.kept[options].run(tensor)


def make_reducer(
    grid: ProcessGrid,
    algorithm: str,
    *,
    average: bool = False,
    grad_dtype: torch.dtype | None = None,
    segment_bytes: int = DEFAULT_SEGMENT_BYTES,
    calibration: Calibration | str | Path | None = None,
) -> AllReducer | AutoReducer:
    """The reducer for an algorithm; "auto" measures (or reads `calibration`), chooses, and sets its own segments."""
    if algorithm == "auto":
        from megabatch.comm.auto import AutoReducer  # which is built of AllReducers

        return AutoReducer(grid, average=average, grad_dtype=grad_dtype, calibration=calibration)
    return AllReducer(grid, algorithm, average=average, grad_dtype=grad_dtype, segment_bytes=segment_bytes)


def message_text(tensor: torch.Tensor) -> str:
    """What is reduced, for people: "1000 float32"."""
    return f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"


def _checked(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as one dimension sharing its memory."""
    if tensor.dtype not in _FLOATS:
        raise ConfigError(f"a tensor of {tensor.dtype} cannot be reduced; give float16, bfloat16, float32 or float64")
    if not tensor.is_contiguous():
        raise ConfigError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous, "
            "and the sum is made in place; reduce tensor.contiguous() and copy it back"
        )
    return tensor.detach().view(-1)


def _fill(message: torch.Tensor, flat: torch.Tensor, lanes: Sequence[Lane]) -> None:
    """Copy into the buffer, dividing before rounding to the wire type: what is too large may fit after."""
    message[flat.numel() :].zero_()
    for lane, part in zip(lanes, split(message, len(lanes)), strict=True):
        start = part.storage_offset() - message.storage_offset()
        source = flat[start : start + part.numel()]
        filled = part[: source.numel()]
        if lane.first_divisor == 1:
            filled.copy_(source)
        else:
            torch.div(source, lane.first_divisor, out=filled)
