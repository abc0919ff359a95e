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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megabatch.comm.division import Division, divisions
from megabatch.comm.grid import ProcessGrid, uses_gloo
from megabatch.comm.lane import Lane, PhaseFailedError
from megabatch.comm.link import message_tag
from megabatch.comm.phases import num_lanes, phases
from megabatch.comm.primitives import split
from megabatch.comm.rollcall import Note, in_words
from megabatch.comm.worker import Workers
from megabatch.errors import ConfigError

if TYPE_CHECKING:
    from megabatch.comm.auto import AutoReducer
    from megabatch.comm.calibration import Calibration

__all__ = ["DEFAULT_SEGMENT_BYTES", "AllReducer", "all_reduce", "make_reducer", "message_text"]

DEFAULT_SEGMENT_BYTES = 256 * 1024

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HALVES = (torch.float16, torch.bfloat16)


class AllReducer:
    """Runs one algorithm on a grid again and again, keeping its buffers. Used by one thread at a time.

    average: divide by the number of ranks (see `division` for where).
    wire_dtype: send float16 or bfloat16 instead of the tensor's own type. The tensor is rounded to it once,
        sums are rounded as `primitives` says, and the result is widened again: every rank holds equal values.
    segment_bytes: larger chunks travel in pieces of about this size, so a hop begins before the last ends.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        algorithm: str = "torus",
        *,
        average: bool = False,
        wire_dtype: torch.dtype | None = None,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
    ) -> None:
        if segment_bytes < 1:
            raise ConfigError(f"segment of {segment_bytes} bytes; give at least 1, or leave it at the default")
        if wire_dtype not in (None, *_FLOATS):
            raise ConfigError(f"wire type {wire_dtype}; choose float16, bfloat16 or none for the tensor's own")
        self.grid = grid
        self.algorithm = algorithm
        self.phases = phases(algorithm, grid.shape)
        self.average = average
        self.wire_dtype = wire_dtype
        self._segment_bytes = segment_bytes
        self._lanes: dict[tuple[bool, bool], list[Lane]] = {}
        self._threads: Workers | None = None
        self._staging: torch.Tensor | None = None
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
        message = self._message(flat, own_primitives)
        lanes = self._lanes_for(message.dtype in _HALVES, own_primitives)
        if message is not flat:
            _fill(message, flat, lanes)
        jobs = [
            partial(self._run_lane, lane, part, call, task, flat, divide_first=message is flat)
            for lane, part in zip(lanes, split(message, len(lanes)), strict=True)
        ]
        seconds = self._run_together(jobs) if own_primitives else [mark for job in jobs for mark in job()]
        if message is not flat:
            flat.copy_(message[: flat.numel()])
        return seconds

    def _run_lane(
        self,
        lane: Lane,
        part: torch.Tensor,
        call: int,
        task: str,
        tensor: torch.Tensor,
        *,
        divide_first: bool,
    ) -> list[tuple[str, float]]:
        tag = message_tag(call, f"{tensor.numel()} {part.dtype} {self.algorithm}")
        try:
            return lane.run(part, tag, divide_first=divide_first)
        except PhaseFailedError as error:
            cause = in_words(error.cause, error.peer, self.grid.timeout_seconds)
            note = Note(self.grid.rank, task, error.phase, call, message_text(tensor), error.peer, cause)
            raise self.grid.fail(note) from error

    def _run_together(self, jobs: Sequence[Callable[[], list[tuple[str, float]]]]) -> list[tuple[str, float]]:
        """Run the first lane here, the others beside it; one that fails hangs up and frees the rest."""
        if len(jobs) > 1 and self._threads is None:
            self._threads = Workers("megabatch-lane", len(jobs) - 1)
        others = [self._threads.submit(job) for job in jobs[1:]] if self._threads else []
        seconds = jobs[0]()
        for other in others:
            seconds += other.result()
        return seconds

    def _message(self, flat: torch.Tensor, own_primitives: bool) -> torch.Tensor:
        """The tensor itself, or a kept buffer of the wire type, padded where chunks must be equal."""
        dtype = self.wire_dtype or flat.dtype
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

    def _lanes_for(self, half_precision: bool, own_primitives: bool) -> list[Lane]:
        key = (half_precision, own_primitives)
        if key not in self._lanes:
            divided = [Division()] * len(self.phases)
            if self.average:
                divided = list(divisions(self.phases, half_precision=half_precision))
            lanes: list[Lane] = []
            for number in range(num_lanes(self.phases)):
                chosen = [index for index, phase in enumerate(self.phases) if phase.lane == number]
                lanes.append(
                    Lane(
                        self.grid,
                        [self.phases[index] for index in chosen],
                        [divided[index] for index in chosen],
                        first_action=lanes[-1].end_action if lanes else 0,
                        segment_bytes=self._segment_bytes,
                        own_primitives=own_primitives,
                    )
                )
            self._lanes[key] = lanes
        return self._lanes[key]


def all_reduce(
    tensor: torch.Tensor,
    grid: ProcessGrid,
    algorithm: str = "torus",
    *,
    average: bool = False,
    wire_dtype: torch.dtype | None = None,
    segment_bytes: int = DEFAULT_SEGMENT_BYTES,
) -> None:
    """Sum (or average) `tensor` over all ranks of `grid`, in place; all ranks must call it in the same order.

    Buffers are kept with the grid. See `AllReducer` for the options and `AllReducer.run` for the errors.
    """
    options = (algorithm, average, wire_dtype, segment_bytes)
    if options not in grid.kept:
        grid.kept[options] = make_reducer(
            grid, algorithm, average=average, wire_dtype=wire_dtype, segment_bytes=segment_bytes
        )
    grid.kept[options].run(tensor)


def make_reducer(
    grid: ProcessGrid,
    algorithm: str,
    *,
    average: bool = False,
    wire_dtype: torch.dtype | None = None,
    segment_bytes: int = DEFAULT_SEGMENT_BYTES,
    calibration: Calibration | str | Path | None = None,
) -> AllReducer | AutoReducer:
    """The reducer for an algorithm; "auto" measures (or reads `calibration`), chooses, and sets its own segments."""
    if algorithm == "auto":
        from megabatch.comm.auto import AutoReducer  # which is built of AllReducers

        return AutoReducer(grid, average=average, wire_dtype=wire_dtype, calibration=calibration)
    return AllReducer(grid, algorithm, average=average, wire_dtype=wire_dtype, segment_bytes=segment_bytes)


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
