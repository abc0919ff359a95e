"""Which rows speak about a system: its own family and software stack, else the nearest there are.

The keys of `interval.EVIDENCE` name the distance: same system, same stack, other stack, other framework, other system.
"""

from __future__ import annotations

from collections.abc import Sequence

from megabatch.errors import DataError
from megabatch.plan.accelerator import generation
from megabatch.plan.rows import Row

__all__ = ["choose_evidence"]


def choose_evidence(
    rows: Sequence[Row], family: str, stack: str, accelerator: str, chassis: str
) -> tuple[list[Row], str]:
    """The rows to calibrate on, and a key of `EVIDENCE`: of the same family and stack, else other stacks or systems.

    Raises:
        DataError: nothing with this accelerator.
    """
    same_family = [row for row in rows if row.family == family]
    same_stack = [row for row in same_family if row.stack == stack]
    if same_stack:
        return same_stack, "same system" if any(row.chassis == chassis for row in same_stack) else "same stack"
    same_framework = [row for row in same_family if row.framework == _framework_of(stack)]
    if same_framework:
        return same_framework, "other stack"
    if same_family:
        return same_family, "other framework"
    relatives = [row for row in rows if row.accelerator == accelerator]
    relatives = relatives or [row for row in rows if generation(row.accelerator) == generation(accelerator)]
    if relatives:
        return relatives, "other system"
    raise DataError(f"no calibration row has the accelerator '{accelerator}'; add one, or measure a node")


def _framework_of(stack: str) -> str:
    return stack.split(" ")[1] if " " in stack else ""
