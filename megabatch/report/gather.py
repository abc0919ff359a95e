"""All figures of a page, in their order, each made when its data is there and left out with a reason when not."""

from __future__ import annotations

from collections.abc import Sequence

from megabatch.report.figure import Figure, Missing
from megabatch.report.figures.curves import accuracy, global_batch_size, images_per_second, loss, lr, momentum
from megabatch.report.figures.network import NetworkTimes, all_reduce
from megabatch.report.figures.noise import ensemble, noise_scale
from megabatch.report.figures.plan import predicted
from megabatch.report.figures.scaling import efficiency
from megabatch.report.figures.step import ranks, step_split
from megabatch.report.network_file import times_of_run
from megabatch.report.run import Run

__all__ = ["all_figures", "network_times"]


def all_figures(runs: Sequence[Run], times: NetworkTimes | None = None) -> list[Figure | Missing]:
    """Every figure, or why it is not there."""
    makers = (
        *(accuracy, loss, lr, global_batch_size, momentum, images_per_second),
        *(step_split, ranks, efficiency, predicted, noise_scale, ensemble),
    )
    found = [make(runs) for make in makers]
    found.insert(8, all_reduce(network_times(runs, times)))
    return found


def network_times(runs: Sequence[Run], times: NetworkTimes | None) -> NetworkTimes:
    """What was given, or else what a run folder holds."""
    if times is not None:
        return times
    found = [times_of_run(run) for run in runs]
    return next((one for one in found if one.measured), NetworkTimes())
