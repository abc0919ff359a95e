"""Where an average is divided, so that half precision neither overflows nor underflows. Imports no torch.

In float32 and float64 the sum is divided once, at the end, by the rank that owns each element.

Float16 ends at 65504 and loses what is below 6e-8. Summing 4096 gradients first overflows; dividing each by
4096 first underflows. A torus offers a natural split: divide by X before the row phase and by Y before the
column phase, so no value on the wire is larger than the largest gradient, and none is divided by more than
one axis at a time. Algorithms that cross the world in one phase divide by about the square root of its size
before and by the rest after, as apex and FSDP do; they overflow when gradients exceed 65504 / sqrt(ranks), the
torus never. Bfloat16 has the range of float32 but takes the same path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megabatch.comm.phases import WORLD, Phase

__all__ = ["Division", "divisions"]


@dataclass(frozen=True, slots=True)
class Division:
    """Divisors around one phase: of a rank's contribution before it, of the result after it; 1 means none."""

    before: float = 1
    after: float = 1


def divisions(phase_list: Sequence[Phase], *, half_precision: bool) -> tuple[Division, ...]:
    """Divisors for each phase that together turn the sum over the world into the average."""
    if half_precision:
        return tuple(_split(phase) for phase in phase_list)
    reducing = [phase for phase in phase_list if phase.reduces]
    last_of_lane = {phase.lane: phase for phase in reducing}
    size_of_lane = {lane: math.prod(phase.size for phase in reducing if phase.lane == lane) for lane in last_of_lane}
    return tuple(
        Division(after=size_of_lane[phase.lane]) if phase is last_of_lane.get(phase.lane) else Division()
        for phase in phase_list
    )


def _split(phase: Phase) -> Division:
    if not phase.reduces:
        return Division()
    if phase.axis != WORLD:
        return Division(before=phase.size)
    before = 2 ** round(math.log2(phase.size) / 2)  # a power of two divides without rounding
    return Division(before, phase.size / before)
