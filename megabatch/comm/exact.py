"""Exact sums: ghost gradients are added as integers, so the sum does not depend on who adds what, and in which order.

    state, hook = gradient_hook(grid, "torus", exact=True)
    ddp.register_comm_hook(state, hook)
    exact = state.exact.bind(ddp.parameters())

    for _ in exact.attempts(num_ghosts):             # nearly always one attempt, see below
        for ghost in my_ghosts:                      # no_sync for all but the last
            loss(ddp(ghost.images), ghost.labels).backward()     # the mean over the ghost's images
            exact.add_ghost()                        # moves the gradient into the integers
    optimizer.step()                                 # gradients are the mean over the step's ghost batches

A tensor's gradient of one ghost batch becomes `round(g * 2^shift)` in int32. Integers are added over ghosts and ranks
and scaled back once. The shift leaves room for the number of ghosts, so that the sum cannot overflow, and
`SPARE_BITS` for a gradient that grows. It follows the largest element seen over all ghost batches of earlier steps: a
maximum, which is the same whoever computed it. An element that does not fit is seen by its rank. One small all-reduce
of maxima at the end of the step tells everybody, and the step is done again with a smaller shift; so is the first step
of a run, which knows no maximum yet. Nothing is clipped in silence. Nor need the host know at once: with `judge` in the
place of `end_step` a device leaves such a step out by itself, see `shifts`.

Shifts are the only state. They depend on the number of steps and on gradients alone, belong to the checkpoint, and go
to a worker that joins.
"""

from __future__ import annotations

import ctypes
import math
import subprocess
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.comm.exact_in_torch import InTorch
from megabatch.comm.shifts import (
    FITS,
    NOT_FINITE,
    REPEAT,
    SPARE_BITS,
    Shifts,
    exponent_of,
    power_of_two,
)
from megabatch.config.comm import MAX_EXACT_GHOSTS
from megabatch.errors import ConfigError, WriteError
from megabatch.machine import build

__all__ = ["SPARE_BITS", "ExactSums", "Pieces", "Verdict", "memory_of_gradient"]


class Verdict(Enum):
    """What became of a step's sum."""

    FITS = "fits"
    REPEAT = "repeat"  # an element did not fit, or there was no maximum to go by: do the step again
    NOT_FINITE = "not finite"  # some gradient holds infinity or NaN; all gradients are now NaN


_VERDICTS = {FITS: Verdict.FITS, REPEAT: Verdict.REPEAT, NOT_FINITE: Verdict.NOT_FINITE}


class Pieces(NamedTuple):
    """What lies in a bucket: parameters, and for each its gradient as one dimension that shares the bucket's memory."""

    parameters: list[Tensor]
    gradients: list[Tensor]


class ExactSums:
    """Integer sums of float32 gradients over ghost batches and ranks; `bind` says of which parameters.

    tap: when set, is given each parameter and its integers of the ghost batch whose pass is going on, possibly by
    several threads; each step begins without.
    """

    def __init__(self) -> None:
        self._parameters: list[Tensor] = []
        self._places: dict[Tensor, int] = {}
        self._totals: list[Tensor] = []  # of the ghosts added in this step; the memory is used again
        self._has_totals = False
        self._sent = False
        self.bind(())

    def bind(self, parameters: Iterable[Tensor]) -> ExactSums:
        """Sum the gradients of these parameters, given in the same order on every rank and in every run."""
        self._parameters = [p for p in parameters if p.requires_grad]
        if wrong := {p.dtype for p in self._parameters} - {torch.float32}:
            raise ConfigError(
                f"exact sums are for float32 gradients, the model has parameters of {wrong.pop()}; use sums in floats"
            )
        self._places = {p: place for place, p in enumerate(self._parameters)}
        self._strides, self._sizes = [p.stride() for p in self._parameters], [p.numel() for p in self._parameters]
        self._device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._shifts = Shifts(len(self._parameters), self._device)
        self._totals = []
        self._knows = False  # some step has counted, so that the next one has shifts to begin with
        self._verdict: Verdict | None = None  # of the step that has ended and is not committed yet, where it was read
        self._in_torch = InTorch(self._sizes, self._device)
        # Bits of each tensor's largest magnitude so far: as integers they have the order of the numbers.
        self._largest = torch.zeros(len(self._parameters), dtype=torch.int32, device=self._device)
        self._spoil = torch.ones(4, device=self._device)  # by verdict: what gradients are multiplied by
        self._spoil[NOT_FINITE] = math.nan
        self._begin(1, 0)
        return self

    @property
    def num_repeats(self) -> Tensor:
        """How many steps were done again so far, the first included, also before `commit`; on the gradients' device."""
        return self._shifts.repeats

    def attempts(self, num_ghosts: int, loss_scale: float | Tensor = 1.0, *, commit: bool = True) -> Iterator[int]:
        """Do a step in the body of this loop: it runs again when the sum did not fit. See `begin_step`.

        commit: the step counts when the loop ends; otherwise it does once `commit` is called. Who leaves the loop
        before its end begins another one for the same step, which knows what this one has seen.
        """
        for attempt in count():
            self.begin_step(num_ghosts, loss_scale)
            yield attempt
            if self.end_step() != Verdict.REPEAT:
                break
        if commit:
            self.commit()

    def begin_step(self, num_ghosts: int, loss_scale: float | Tensor = 1.0) -> None:
        """Before a step's first backward pass; sets gradients to None.

        num_ghosts: ghost batches of all ranks. loss_scale: what losses are multiplied by, a power of two.
        """
        if not self._parameters:
            raise ConfigError("exact sums know no parameters yet; call bind(model.parameters()) first")
        if not 1 <= num_ghosts <= MAX_EXACT_GHOSTS:
            raise ConfigError(
                f"a step of {num_ghosts} ghost batches; exact sums hold 1 to {MAX_EXACT_GHOSTS}: make ghost batches "
                "larger (train.ghost_batch_size), or set comm.sums=float"
            )
        scale_bits = exponent_of(loss_scale) if isinstance(loss_scale, Tensor) else math.frexp(loss_scale)[1] - 1
        self._begin(num_ghosts, scale_bits)
        for parameter in self._parameters:
            parameter.grad = None

    def add_ghost(self) -> None:
        """After every backward pass: take its gradient into the sum. The last pass has sent its own already."""
        if self._sent:
            self._in_torch.end_pass(self._largest)
            return
        if not self._totals:
            memory = torch.empty(sum(self._sizes), dtype=torch.int32, device=self._device)
            order = self._in_torch.order or range(len(self._sizes))
            totals = zip(order, memory.split([self._sizes[place] for place in order]), strict=True)
            self._totals = [total for _, total in sorted(totals, key=lambda of_place: of_place[0])]
            self._total_addresses = [total.data_ptr() for total in self._totals] if _has_helper(memory) else []
        places, gradients = [], []
        for place, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is not None:
                places.append(place)
                gradients.append(gradient if lies_as(gradient, self._strides[place]) else _laid_as(parameter, gradient))
                parameter.grad = None
            elif not self._has_totals:  # those of the others are overwritten
                self._totals[place].zero_()
        self._convert(places, gradients, [self._totals[place] for place in places])
        self._in_torch.end_pass(self._largest)
        self._has_totals = True

    def was_added(self, *, sent: bool) -> None:
        """A pass was made by a graph, which holds what `add_ghost` does, or `send` and the rest."""
        self._sent, self._has_totals = sent, self._has_totals or not sent

    def send(self) -> None:
        """The pass that is going on sends its gradients: `add_ghost` leaves them alone."""
        self._sent = True

    def to_integers(self, pieces: Pieces) -> None:
        """Replace gradients in a bucket by integers in the same memory, plus what was added before."""
        places = [self._places[p] for p in pieces.parameters]
        self._convert(places, pieces.gradients, [gradient.view(torch.int32) for gradient in pieces.gradients])

    def to_floats(self, pieces: Pieces) -> None:
        """Turn integers, now summed over the ranks, back into gradients: the mean over the step's ghost batches."""
        places = [self._places[parameter] for parameter in pieces.parameters]
        if not _has_helper(pieces.gradients[0]):
            self._in_torch.to_floats(places, pieces.gradients)
            return
        addresses = [gradient.data_ptr() for gradient in pieces.gradients]
        sizes, shifts = [self._sizes[place] for place in places], [self._host_shifts[place] for place in places]
        _helper().megabatch_to_floats(_table(addresses, sizes, shifts), len(shifts), self._num_ghosts)

    def integers_of(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """What a ghost batch's gradient of this parameter adds to the sum of the present step."""
        up = power_of_two(self._step_shifts[self._places[parameter]]).to(torch.float32)
        return torch.round(gradient * up).to(torch.int32)

    def end_step(self) -> Verdict:
        """After a step's last backward pass, on every rank: whether its gradients can be used. Then `commit`.

        On an accelerator this waits for the step; `judge` does not.
        """
        verdict = _VERDICTS[int(self._judge(late=False))]
        if verdict == Verdict.NOT_FINITE:
            for gradient in self._gradients():
                gradient.fill_(math.nan)
        self._verdict = verdict
        return verdict

    def judge(self) -> Tensor:
        """As `end_step`, but nobody waits: whether the step must be left out, on the device, and done `again`.

        All steps that are begun behind such a one are to be left out as well, until `again` is called. Only for sums
        that have `shifts` to begin with. Gradients that are not finite are NaN, as after `end_step`.
        """
        verdict = self._judge(late=True)
        gradients = self._gradients()
        torch._foreach_mul_(gradients, self._spoil.index_select(0, verdict).squeeze())
        self._verdict = None
        return self._shifts.is_left_out

    def again(self) -> None:
        """A verdict of `judge` has been read, and the step did not fit: it is done again next."""
        self._shifts.again()

    def commit(self) -> None:
        """The step counts: the next one goes by what this one has seen. Nothing to do after one that is not finite."""
        self._shifts.commit()
        self._knows = self._knows or self.fits
        self._verdict = None

    def rollback(self) -> None:
        """The step does not count: another will begin from where this one began, also if it was being repeated."""
        self._shifts.rollback()
        self._verdict = None

    @property
    def fits(self) -> bool:
        """Whether the step that has ended, and is not committed yet, has a sum that can be used."""
        return self._verdict == Verdict.FITS

    @property
    def is_new(self) -> bool:
        """Whether no gradient has been seen yet, so that the first step must be repeated."""
        return not self._knows and self._verdict != Verdict.REPEAT

    @property
    def has_shifts(self) -> bool:
        """Whether some step has counted, so that the next one has shifts to go by."""
        return self._knows

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, the same on every rank."""
        return self._shifts.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, on any number of ranks; after `bind`."""
        self._shifts.load_state_dict(state)
        self._knows = None not in state["exponents"]
        self._verdict = None

    def _begin(self, num_ghosts: int, scale_bits: int | Tensor) -> None:
        self._num_ghosts, self._scale_bits = num_ghosts, scale_bits
        self._step_shifts = self._shifts.of_step(num_ghosts, scale_bits, known=self._knows)
        self._host_shifts: list[int] = []
        if _has_helper(self._step_shifts):
            self._host_shifts = self._step_shifts.tolist()
        elif self._in_torch.begin_step(self._step_shifts, num_ghosts):
            self._totals = []  # they lie as buckets do
        self._has_totals = self._sent = False
        self.tap: Callable[[Tensor, Tensor], None] | None = None
        self._largest.zero_()

    def _judge(self, *, late: bool) -> Tensor:
        self._in_torch.end_pass(self._largest)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self._largest, op=dist.ReduceOp.MAX)
        return self._shifts.judge(self._largest, self._scale_bits, late=late, known=self._knows)

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def _convert(self, places: list[int], gradients: list[Tensor], results: list[Tensor]) -> None:
        """results = totals + round(gradients * 2^shift), totals counting as 0 before the first; notes largest elements.

        Gradients lie in memory as their parameters do. The helper is given addresses, all in one call: with many small
        tensors a call to torch for each takes longer than the arithmetic.
        """
        if self.tap is not None:
            for place, gradient in zip(places, gradients, strict=True):
                parameter = self._parameters[place]
                self.tap(parameter, self.integers_of(parameter, flat(gradient)))
        if not places:
            return
        if not _has_helper(gradients[0]):
            totals = [self._totals[place] for place in places] if self._has_totals else None
            self._in_torch.to_integers(places, [flat(gradient) for gradient in gradients], totals, results)
            return
        sources = [self._total_addresses[place] for place in places] if self._has_totals else [0] * len(places)
        targets = [result.data_ptr() for result in results]
        addresses = [gradient.data_ptr() for gradient in gradients]
        sizes, shifts = [self._sizes[place] for place in places], [self._host_shifts[place] for place in places]
        table = _table(addresses, sources, targets, sizes, shifts, places)
        _helper().megabatch_to_integers(table, len(places), self._largest.data_ptr())


def memory_of_gradient(parameter: Tensor) -> Tensor:
    """The gradient's elements in the order of the parameter's memory, as DDP lays them into buckets."""
    gradient = parameter.grad
    assert gradient is not None
    if not lies_as(gradient, parameter.stride()):
        gradient = _laid_as(parameter, gradient)
    return flat(gradient)


def lies_as(gradient: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether the gradient lies in memory with these strides; a dimension of one lies anywhere."""
    own = gradient.stride()
    return own == strides or all(
        size == 1 or one == wanted for size, one, wanted in zip(gradient.shape, own, strides, strict=True)
    )


def _laid_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """A copy of the gradient that lies in memory as the parameter does."""
    return torch.empty_like(parameter).copy_(gradient)


def flat(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of its memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _table(*columns: Sequence[int]) -> Any:
    """Columns of numbers, one after the other, as the helper takes them."""
    rows = array("q")
    for column in columns:
        rows.extend(column)
    return (ctypes.c_int64 * len(rows)).from_buffer(rows)


def _has_helper(tensor: Tensor) -> bool:
    """Whether the compiled helper works on this tensor."""
    return tensor.device.type == "cpu" and _helper() is not None


@cache
def _helper() -> Any:
    """The compiled helper; None where it cannot be had."""
    try:
        library = ctypes.CDLL(str(build(Path(__file__).with_name("exact.c"))))
    except (OSError, WriteError, subprocess.SubprocessError):
        return None
    table, number = ctypes.POINTER(ctypes.c_int64), ctypes.c_int64
    library.megabatch_to_integers.argtypes = [table, number, ctypes.c_void_p]
    library.megabatch_to_floats.argtypes = [table, number, number]
    library.megabatch_to_integers.restype = library.megabatch_to_floats.restype = None
    return library
