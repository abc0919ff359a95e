"""What binds a plan: the same model is asked what would be saved if one thing were twice as good.

Whatever would save most is what binds. That is not always the largest part of a step: compute may take most of it
and yet, made faster, only uncover communication that it hides.
"""

from __future__ import annotations

from dataclasses import dataclass

from megabatch.comm.shape import GridShape
from megabatch.plan.cluster import KNOBS, NETWORK_KNOBS, Cluster
from megabatch.plan.convergence import ConvergenceLaw
from megabatch.plan.cost import price_all_reduce
from megabatch.plan.predict import Prediction, expected_seconds
from megabatch.plan.step_fit import StepFit
from megabatch.plan.workload import Workload
from megabatch.schedule.batch import BatchStages

__all__ = ["INITIALISATION", "Help", "what_would_help"]

INITIALISATION = "initialisation"

_WORDS = {
    "compute": ("compute", "compute twice as fast"),
    "worker link": ("links between the workers of a node", "twice the rate between workers of a node"),
    "NIC": ("NIC", "twice the NIC rate"),
    "rack uplink": ("rack uplinks", "twice the rack uplinks"),
    "wire latency": ("latency of the network", "half the wire latency"),
    "software latency": ("latency of the software", "half the software latency"),
    "stragglers": ("stragglers", "half the scatter of workers"),
    "loader": ("loader", "twice the loader rate"),
}
_FASTER = {"wire latency": 0.5, "software latency": 0.5, "stragglers": 0.5, "compute": 0.5}


@dataclass(frozen=True, slots=True)
class Help:
    """What one change would gain: part of the total time saved (negative: lost); `binding` is what it loosens."""

    what: str
    gain: float
    binding: str


def what_would_help(
    cluster: Cluster, workload: Workload, chosen: Prediction, law: ConvergenceLaw | None, fit: StepFit | None
) -> list[Help]:
    """What the chosen plan would gain by each change, most first; without a law a larger batch is not judged."""
    now = chosen.total.middle
    found = []
    for knob in KNOBS:
        better = _FASTER.get(knob, 2.0)
        changed = cluster.changed(knob, better)
        fit_then = fit
        if fit is not None and knob in NETWORK_KNOBS:
            fit_then = fit.changed("exposed", _price_ratio(cluster, changed, workload, chosen.candidate.workers))
        elif fit is not None and knob in ("compute", "stragglers"):
            fit_then = fit.changed(knob, better)
        then = expected_seconds(changed, workload, chosen.candidate, law, fit_then)
        binding, what = _WORDS[knob]
        found.append(Help(what, 1 - then / now, binding))
    if law is not None:
        now_stages = workload.stages_over(chosen.epochs.middle)
        doubled = BatchStages(now_stages.from_epochs, tuple(2 * total for total in now_stages.global_batch_sizes))
        then = expected_seconds(cluster, workload.with_batch(doubled), chosen.candidate, law, fit)
        found.append(Help("twice the total batch", 1 - then / now, "total batch"))
        spared = 1 - law.floor_epochs / chosen.epochs.middle
        part = chosen.time_parts["steps"] / now
        found.append(Help("as few epochs as a small batch needs", spared * part, "convergence at this batch"))
    found.append(Help("half the initialisation", 0.5 * chosen.time_parts[INITIALISATION] / now, INITIALISATION))
    return sorted(found, key=lambda one: -one.gain)


def _price_ratio(before: Cluster, after: Cluster, workload: Workload, workers: int) -> float:
    """How much longer the backend's own all-reduce of a gradient takes: what a fit counts as exposed goes with it."""
    if workers == 1:
        return 1.0
    shape = GridShape((1, workers))
    prices = [price_all_reduce(one, "backend", shape, workload.gradient_bytes).seconds for one in (before, after)]
    return prices[1] / prices[0]
