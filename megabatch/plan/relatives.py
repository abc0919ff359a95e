"""Which rows speak about a system: its own family and software stack, else the nearest there are.

The keys of `interval.EVIDENCE` name the distance: same system, same stack, other stack, other framework, other system.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from megabatch.errors import DataError
from megabatch.plan.rows import Row

__all__ = ["choose_evidence", "generation"]


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


def generation(accelerator: str) -> str:
    """The accelerator without memory size and board: "a100", "tpu-v4", "ascend910"."""
    name = {"dgx1": "v100", "dgx2": "v100", "dgx2h": "v100", "dgxa100": "a100", "dgxh100": "h100"}.get(accelerator)
    found = re.match(r"tpu-v\d+|[a-z]+-?\d+", accelerator)
    return name or (
        found[0] if found and found[0].startswith("tpu") else found[0].replace("-", "") if found else accelerator
    )


def _framework_of(stack: str) -> str:
    return stack.split(" ")[1] if " " in stack else ""
