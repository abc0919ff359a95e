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
of a run, which knows no maximum yet. Nothing is clipped in silence.

Shifts are the only state. They depend on the number of steps and on gradients alone, belong to the checkpoint, and go
to a worker that joins.
"""

from __future__ import annotations

import ctypes
import math
import subprocess
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.config.comm import MAX_EXACT_GHOSTS
from megabatch.errors import ConfigError, WriteError
from megabatch.machine import build

__all__ = ["SPARE_BITS", "ExactSums", "Pieces", "Verdict", "memory_of_gradient"]

SPARE_BITS = 4
"""A gradient may grow by 2^SPARE_BITS from one step to the next before a step must be repeated."""

_BITS = 30  # of the magnitude of a sum
_FORGET_STEPS = 16  # a maximum that is not seen again loses half in so many steps
_SMALLEST_EXPONENT = -80  # of gradients: smaller ones count as this large, so that 2^shift stays a finite float32
_NOT_FINITE = 0x7F800000  # bits of infinity; NaN has larger ones


class Verdict(Enum):
    """What became of a step's sum."""

    FITS = "fits"
    REPEAT = "repeat"  # an element did not fit, or there was no maximum to go by: do the step again
    NOT_FINITE = "not finite"  # some gradient holds infinity or NaN; all gradients are now NaN


class Pieces(NamedTuple):
    """What lies in a bucket: parameters, and for each its gradient as one dimension that shares the bucket's memory."""

    parameters: list[Tensor]
    gradients: list[Tensor]


class ExactSums:
    """Integer sums of float32 gradients over ghost batches and ranks; `bind` says of which parameters.

    repeats: how many steps had to be done again so far, the first one included. tap: when set, is given each parameter
    and its integers of the ghost batch whose pass is going on, possibly by several threads; each step begins without.
    """

    def __init__(self) -> None:
        self.repeats = 0
        self._steps = 0
        self._parameters: list[Tensor] = []
        self._places: dict[Tensor, int] = {}
        self._exponents: list[int | None] = []  # largest elements are below 2^exponent; None until one has been seen
        self._raised: list[int] = []  # exponents by which the present step is repeated
        self._num_raised = 0
        self._next: list[int] = []  # exponents after the present step, once it counts
        self._totals: list[Tensor] = []  # of the ghosts added in this step; the memory is used again
        self._has_totals = False
        self._sent = False
        self._begin(1, 0)

    def bind(self, parameters: Iterable[Tensor]) -> ExactSums:
        """Sum the gradients of these parameters, given in the same order on every rank and in every run."""
        self._parameters = [p for p in parameters if p.requires_grad]
        if wrong := {p.dtype for p in self._parameters} - {torch.float32}:
            raise ConfigError(
                f"exact sums are for float32 gradients, the model has parameters of {wrong.pop()}; use sums in floats"
            )
        self._places = {p: place for place, p in enumerate(self._parameters)}
        self._exponents = [None] * len(self._parameters)
        self._totals = []
        self._begin(1, 0)
        return self

    def attempts(self, num_ghosts: int, loss_scale: float = 1.0) -> Iterator[int]:
        """Do a step in the body of this loop: it runs again when the sum did not fit. See `begin_step`."""
        attempt, verdict = 0, Verdict.REPEAT
        while verdict == Verdict.REPEAT:
            self.begin_step(num_ghosts, loss_scale)
            yield attempt
            verdict = self.end_step()
            attempt += 1
        self.commit()

    def begin_step(self, num_ghosts: int, loss_scale: float = 1.0) -> None:
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
        self._begin(num_ghosts, math.frexp(loss_scale)[1] - 1)
        for parameter in self._parameters:
            parameter.grad = None

    def add_ghost(self) -> None:
        """After every backward pass: take its gradient into the sum. The last pass has sent its own already."""
        if self._sent:
            return
        if not self._totals:
            self._totals = [torch.empty(p.numel(), dtype=torch.int32, device=p.device) for p in self._parameters]
        found = [p for p in self._parameters if p.grad is not None]
        totals = [self._totals[self._places[p]] for p in found]
        if not self._has_totals:
            for parameter in self._parameters:  # those of found ones are overwritten
                if parameter.grad is None:
                    self._totals[self._places[parameter]].zero_()
        if found:
            self._convert(found, [memory_of_gradient(p) for p in found], totals if self._has_totals else None, totals)
        self._has_totals = True
        for parameter in found:
            parameter.grad = None

    def send(self) -> None:
        """The pass that is going on sends its gradients: `add_ghost` leaves them alone."""
        self._sent = True

    def to_integers(self, pieces: Pieces) -> None:
        """Replace gradients in a bucket by integers in the same memory, plus what was added before."""
        totals = [self._totals[self._places[p]] for p in pieces.parameters] if self._has_totals else None
        self._convert(pieces.parameters, pieces.gradients, totals, [g.view(torch.int32) for g in pieces.gradients])

    def to_floats(self, pieces: Pieces) -> None:
        """Turn integers, now summed over the ranks, back into gradients: the mean over the step's ghost batches."""
        helper = _helper() if pieces.gradients[0].device.type == "cpu" else None
        for parameter, gradient in zip(pieces.parameters, pieces.gradients, strict=True):
            factor = 2.0 ** -self._shifts[self._places[parameter]] / self._num_ghosts
            if helper is not None:
                helper.megabatch_to_floats(gradient.data_ptr(), gradient.numel(), factor)
            else:
                gradient.copy_(gradient.view(torch.int32).to(torch.float32) * factor)

    def integers_of(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """What a ghost batch's gradient of this parameter adds to the sum of the present step."""
        return torch.round(gradient * 2.0 ** self._shifts[self._places[parameter]]).to(torch.int32)

    def end_step(self) -> Verdict:
        """After a step's last backward pass, on every rank: whether its gradients can be used. Then `commit`."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self._largest, op=dist.ReduceOp.MAX)
        bits = self._largest.tolist()
        if max(bits) >= _NOT_FINITE:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.fill_(math.nan)
            return Verdict.NOT_FINITE
        present = self._raised or self._exponents
        seen = [max(_SMALLEST_EXPONENT, (value >> 23) - 126 - self._scale_bits) for value in bits]
        known = [_SMALLEST_EXPONENT if exponent is None else exponent for exponent in present]
        pairs = list(zip(seen, known, strict=True))
        if None in present or any(new > old + SPARE_BITS for new, old in pairs):
            self._raised = [max(pair) for pair in pairs]
            self._num_raised += 1
            return Verdict.REPEAT
        forget = int((self._steps + 1) % _FORGET_STEPS == 0)
        self._next = [max(new, old - forget) for new, old in pairs]
        return Verdict.FITS

    def commit(self) -> None:
        """The step counts: the next one goes by what this one has seen. Nothing to do after one that is not finite."""
        if self._next:
            self._exponents, self._steps = list(self._next), self._steps + 1
            self.repeats += self._num_raised
        self.rollback()

    def rollback(self) -> None:
        """The step does not count: another will begin from where this one began, also if it was being repeated."""
        self._next, self._raised, self._num_raised = [], [], 0

    @property
    def is_new(self) -> bool:
        """Whether no gradient has been seen yet, so that the first step must be repeated."""
        return None in self._exponents and not self._raised

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, the same on every rank."""
        return {"exponents": list(self._exponents), "steps": self._steps, "repeats": self.repeats}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, on any number of ranks; after `bind`."""
        if len(state["exponents"]) != len(self._parameters):
            raise ConfigError(
                f"exact sums of {len(state['exponents'])} parameters do not fit a model of {len(self._parameters)}; "
                "load the state of the same model"
            )
        self._exponents = list(state["exponents"])
        self._steps, self.repeats = state["steps"], state["repeats"]

    def _begin(self, num_ghosts: int, scale_bits: int) -> None:
        self._num_ghosts, self._scale_bits = num_ghosts, scale_bits
        room = _BITS - (num_ghosts - 1).bit_length() - SPARE_BITS - scale_bits
        self._shifts = [room - (exponent or 0) for exponent in self._raised or self._exponents]
        self._next = []
        self._has_totals = self._sent = False
        self.tap: Callable[[Tensor, Tensor], None] | None = None
        device = self._parameters[0].device if self._parameters else None
        # Bits of each tensor's largest magnitude so far: as integers they have the order of the numbers.
        self._largest = torch.zeros(len(self._parameters), dtype=torch.int32, device=device)

    def _convert(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        totals: list[Tensor] | None,
        results: list[Tensor],
    ) -> None:
        """results = totals + round(gradients * 2^shift); notes the largest elements."""
        if self.tap is not None:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                self.tap(parameter, self.integers_of(parameter, gradient))
        places = [self._places[p] for p in parameters]
        scales = [2.0 ** self._shifts[place] for place in places]
        helper = _helper() if gradients[0].device.type == "cpu" else None
        if helper is not None:
            addresses = [t.data_ptr() for t in totals] if totals else [None] * len(gradients)
            largest = torch.tensor(
                [
                    helper.megabatch_to_integers(gradient.data_ptr(), total, out.data_ptr(), out.numel(), scale)
                    for gradient, total, out, scale in zip(gradients, addresses, results, scales, strict=True)
                ],
                dtype=torch.int32,
            )
        else:
            largest = torch.stack(torch._foreach_norm(gradients, math.inf)).abs().view(torch.int32)
            scaled = torch._foreach_mul(gradients, scales)
            torch._foreach_round_(scaled)
            if totals is None:
                torch._foreach_copy_(results, scaled)
            else:
                integers = [value.to(torch.int32) for value in scaled]
                torch._foreach_copy_(results, torch._foreach_add(totals, integers))
        # Other threads write other places.
        where = torch.tensor(places, device=largest.device)
        self._largest[where] = torch.maximum(self._largest[where], largest)


def memory_of_gradient(parameter: Tensor) -> Tensor:
    """The gradient's elements in the order of the parameter's memory, as DDP lays them into buckets."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter).copy_(gradient)
    return gradient.detach().as_strided((gradient.numel(),), (1,))


@cache
def _helper() -> Any:
    """The compiled helper; None where it cannot be had."""
    try:
        library = ctypes.CDLL(str(build(Path(__file__).with_name("exact.c"))))
    except (OSError, WriteError, subprocess.SubprocessError):
        return None
    pointer, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    library.megabatch_to_integers.argtypes = [pointer, pointer, pointer, count, number]
    library.megabatch_to_integers.restype = ctypes.c_int32
    library.megabatch_to_floats.argtypes = [pointer, count, number]
    library.megabatch_to_floats.restype = None
    return library
