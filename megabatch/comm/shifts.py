"""By how many bits gradients are shifted before they become integers, and whether the integers were large enough.

Everything here is a tensor that lies where the gradients do. So a step can be judged, and the next one begun, without
anybody on the host knowing the verdict yet: on an accelerator it is read a step late.

Steps that are queued behind one that did not fit must not count, whatever becomes of them: from that verdict on, all
are void until the host has learned of it and calls `again`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megabatch.errors import ConfigError

SPARE_BITS = 4
"""A gradient may grow by 2^SPARE_BITS from one step to the next before a step must be repeated."""

FITS, REPEAT, NOT_FINITE, VOID = range(4)  # what a verdict says: the largest of all that hold; odd ones leave it out

_BITS = 30  # of the magnitude of a sum
_FORGET_STEPS = 16  # a maximum that is not seen again loses half in so many steps
_SMALLEST_EXPONENT = -80  # of gradients: smaller ones count as this large, so that 2^shift stays a finite float32
_UNKNOWN = -1000  # of a tensor whose gradient nobody has seen
_INFINITY_BITS = 0x7F800000  # NaN has larger ones


class Shifts:
    """Largest elements are below 2^exponent, by tensor; the present step goes by `_present`, which may be raised.

    repeats: how many steps had to be done again so far, with one that fits and is not committed yet. is_left_out:
    whether the step that was judged last must not count.
    """

    def __init__(self, num_tensors: int, device: torch.device) -> None:
        self._exponents = torch.full((num_tensors,), _UNKNOWN, dtype=torch.int64, device=device)
        self._steps, self._repeats, self._raised = (
            torch.zeros((), dtype=torch.int64, device=device) for _ in range(3)
        )  # steps that count, those of them that were done again so often, and how often the present one
        self._void = torch.zeros((), dtype=torch.bool, device=device)
        self._present = self._next = self._exponents
        self._no, self._yes = (torch.full((), truth, dtype=torch.bool, device=device) for truth in (False, True))
        self._forget_verdict()

    def _forget_verdict(self) -> None:
        self.repeats, self._fits, self.is_left_out = self._repeats, self._no, self._yes

    def of_step(self, num_ghosts: int, scale_bits: int | Tensor, *, known: bool = False) -> Tensor:
        """The shifts of a step of so many ghost batches, whose losses are multiplied by 2^scale_bits.

        known: some step has counted, so that every tensor has an exponent.
        """
        room = _BITS - (num_ghosts - 1).bit_length() - SPARE_BITS
        present = self._present if known else torch.where(self._present == _UNKNOWN, 0, self._present)
        return (room - scale_bits) - present

    def judge(self, largest: Tensor, scale_bits: int | Tensor, *, late: bool = False, known: bool = False) -> Tensor:
        """The verdict of a step by the bits of the largest magnitude in each tensor, over all ranks.

        late: the next step may begin before the verdict is read. known: as in `of_step`.
        """
        seen = ((largest >> 23) - (126 + scale_bits)).clamp_min(_SMALLEST_EXPONENT)
        before = self._present if known else self._present.clamp_min(_SMALLEST_EXPONENT)
        is_too_large = (seen - before).amax() > SPARE_BITS
        if not known:
            is_too_large = is_too_large | (self._present == _UNKNOWN).any()
        is_not_finite = largest.amax() >= _INFINITY_BITS
        found = torch.maximum(is_too_large, is_not_finite * NOT_FINITE)  # REPEAT is 1
        verdict = torch.maximum(found, self._void * VOID)
        repeat, self._fits, self.is_left_out = verdict == REPEAT, verdict == FITS, (verdict & 1).bool()
        forget = (self._steps + 1) % _FORGET_STEPS == 0
        self._next = torch.maximum(seen, torch.add(before, forget, alpha=-1))
        self._present = torch.where(repeat, torch.maximum(seen, before), self._present)
        self._raised = self._raised + repeat
        self.repeats = torch.addcmul(self._repeats, self._raised, self._fits)
        if late:
            self._void = self._void | repeat
        return verdict

    def commit(self) -> None:
        """The step counts if it fits, and is over unless it must be repeated."""
        self._exponents = torch.where(self._fits, self._next, self._exponents)
        self._steps = self._steps + self._fits
        self._repeats = self.repeats
        self._present = torch.where(self.is_left_out, self._present, self._exponents)
        self._raised = self._raised * self.is_left_out
        self._forget_verdict()

    def again(self) -> None:
        """The host knows that a step did not fit: the next one that begins is that step."""
        self._void = torch.zeros_like(self._void)

    def rollback(self) -> None:
        """The present step does not count: another begins where it began, also if it was being repeated."""
        self.again()
        self._present, self._raised = self._exponents, torch.zeros_like(self._raised)
        self._forget_verdict()

    def state_dict(self) -> dict[str, object]:
        """Plain numbers."""
        exponents = [None if exponent == _UNKNOWN else exponent for exponent in self._exponents.tolist()]
        return {"exponents": exponents, "steps": int(self._steps), "repeats": int(self._repeats)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from `state`."""
        exponents = state["exponents"]
        assert isinstance(exponents, list)
        if len(exponents) != len(self._exponents):
            raise ConfigError(
                f"exact sums of {len(exponents)} parameters do not fit a model of {len(self._exponents)}; "
                "load the state of the same model"
            )
        known = [_UNKNOWN if exponent is None else exponent for exponent in exponents]
        device = self._exponents.device
        self._exponents = torch.tensor(known, device=device)
        self._steps, self._repeats = (torch.tensor(state[name], device=device) for name in ("steps", "repeats"))
        self.rollback()


def power_of_two(exponents: Tensor) -> Tensor:
    """2^exponent in float64, made of bits: no rounding anywhere."""
    return ((exponents + 1023) << 52).view(torch.float64)


def exponent_of(power: Tensor) -> Tensor:
    """The exponent of a power of two in float32."""
    return (power.view(torch.int32).long() >> 23) - 127
