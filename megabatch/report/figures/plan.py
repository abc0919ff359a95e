"""What was predicted before the run beside what was measured in it."""

from __future__ import annotations

from collections.abc import Sequence

from megabatch.report.figure import Figure, Missing
from megabatch.report.run import Run

__all__ = ["predicted"]


def predicted(runs: Sequence[Run]) -> Figure | Missing:
    """Seconds of an update and images per second, predicted by `plan.json` and measured."""
    return Missing("predicted", "Predicted against measured", "the run folder holds no plan.json")
