"""One optimizer step: ghost batches passed, their sum judged, numbers added up over ranks, optimizer stepped.

What is logged and decided has the same bits on any number of ranks: each ghost batch has its own place in one small
message, other ranks add zero to it, and every rank sums up the places in the same order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from megabatch.comm.noise_scale import NoiseScale
from megabatch.comm.transfer import Reading, upload
from megabatch.data.loader import Ghost
from megabatch.optim.build import prepare_step
from megabatch.optim.skip import step_unless, update_scale
from megabatch.schedule.batch import Step
from megabatch.schedule.noise import NoiseSample
from megabatch.train.audit import Audit
from megabatch.train.components import Components
from megabatch.train.metrics import PARTS, Stopwatch
from megabatch.train.passes import loss_alone, pass_ghosts, seed_torch
from megabatch.train.phases import audit_is_due


@dataclass(frozen=True)
class StepResult:
    """What a step did, the same on every rank but for the seconds of the step and of the optimizer."""

    num_samples: int
    loss: float
    top1: float
    gradient_norm: float  # before it is clipped
    repeated_steps: int  # steps so far that were done again because an exact sum did not fit
    applied: bool  # False when the gradient was not finite and the optimizer left the weights alone
    stop_wanted: bool  # some rank was asked to stop, or all to leave
    ask_wanted: bool  # some rank wants to know who takes part now
    noise_average: NoiseSample | None  # smoothed noise and signal of the gradient, when this step was measured
    noise_scale: float | None  # smoothed, in images; None when it is not measured, or not known
    step_seconds: float
    part_seconds: dict[str, float]  # by part of the step, mean over ranks; NaN where the host's clock does not tell

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of this step in `metrics.jsonl`."""
        waiting = self.part_seconds["data"] + self.part_seconds["communication"]
        columns = {
            "loss": self.loss,
            "top1": self.top1,
            "global_batch_size": self.num_samples,
            "images_per_second": self.num_samples / self.step_seconds,
            "gradient_norm": self.gradient_norm,
            "applied": int(self.applied),
            "repeated_steps": self.repeated_steps,
            "step_seconds": self.step_seconds,
            "compute_seconds": max(self.step_seconds - waiting, 0.0),  # NaN stays NaN
            **{f"{part}_seconds": seconds for part, seconds in self.part_seconds.items()},
        }
        return columns if self.noise_scale is None else {**columns, "noise_scale": self.noise_scale}


@dataclass(frozen=True)
class Votes:
    """What a rank wants after a step; all ranks hear of it with the numbers of the step."""

    stop_wanted: bool = False  # the run shall stop here
    leave_wanted: bool = False  # this rank shall, and the others go on
    ask_wanted: bool = False  # to know who takes part now


class StepTotals:
    """The numbers of a step, added up over all ranks in one message: a table by ghost batch, then others by name.

    Tensors are on the device, and what is there goes before what is on the host.
    """

    def __init__(self, by_ghost: Tensor, numbers: Mapping[str, Tensor | float], world_size: int) -> None:
        on_device = {name: number.double() for name, number in numbers.items() if isinstance(number, Tensor)}
        on_host = {name: number for name, number in numbers.items() if not isinstance(number, Tensor)}
        host = upload(list(on_host.values()), by_ghost.device)
        self._sums = torch.cat([by_ghost.reshape(-1), torch.stack(list(on_device.values())), host])
        if world_size > 1:
            dist.all_reduce(self._sums)
        self._places = {name: place for place, name in enumerate([*on_device, *on_host], by_ghost.numel())}
        self._table_size = by_ghost.numel()
        self._reading = Reading(self._sums)

    def __getitem__(self, name: str) -> Tensor:
        """A sum, on the device."""
        return self._sums[self._places[name]]

    def read(self) -> tuple[list[float], dict[str, float]]:
        """The table row by row, and the other sums; waits until they are there."""
        sums = self._reading.list()
        return sums[: self._table_size], {name: sums[place] for name, place in self._places.items()}


class StartedStep:
    """A step that the device may still be working on. Read the results of steps in their order.

    When one gives None, an exact sum did not fit: it has left no trace, nor have those that were started since. Call
    `drop` for each of these, and go on with the one that did not fit.
    """

    def __init__(
        self,
        components: Components,
        step: Step,
        totals: StepTotals,
        watch: Stopwatch,
        began: float,
        exposed_seconds: Callable[[], float],
        noise_scale: NoiseScale | None,
    ) -> None:
        self._components, self._step, self._totals, self._watch, self._began = components, step, totals, watch, began
        self._exposed_seconds = exposed_seconds
        self._counts, self._optimizer_seconds = watch.end(), watch.seconds["optimizer"]
        self._noise_scale = noise_scale  # None: this step is none of those that may be measured
        self._is_measured = noise_scale is not None and noise_scale.measuring
        self._num_measured = noise_scale.num_measured if noise_scale is not None else 0

    def drop(self) -> None:
        """The step was left out, and will be done again."""
        if self._noise_scale is not None:
            self._noise_scale.forget_step()

    def result(self) -> StepResult | None:
        """What the step did; waits until it is done."""
        by_ghost, sums = self._totals.read()
        components, step, noise_scale = self._components, self._step, self._noise_scale
        if components.exact is not None and sums["left_out"]:
            self.drop()
            components.exact.again()
            return None
        part_seconds = {part: sums[part] / components.world.size for part in PARTS}
        part_seconds["optimizer"] = self._optimizer_seconds  # every rank does the same there
        if components.device.type != "cpu":
            part_seconds["communication"] = self._exposed_seconds()
            self._watch.expose_late(part_seconds["communication"], self._counts)
        if noise_scale is not None:
            noise_scale.settle(self._num_measured)
        applied = sums["not_finite"] == 0
        return StepResult(
            num_samples=step.num_samples,
            loss=math.fsum(by_ghost[::2]) / step.num_samples,
            top1=math.fsum(by_ghost[1::2]) / step.num_samples,
            gradient_norm=sums["gradient_norm"],
            applied=applied,
            repeated_steps=int(sums["repeats"]),
            stop_wanted=sums["stop_wanted"] > 0 or sums["leave_wanted"] == components.world.size,
            ask_wanted=sums["ask_wanted"] > 0,
            noise_average=noise_scale.average.sample() if noise_scale and self._is_measured and applied else None,
            noise_scale=noise_scale.scale if noise_scale else None,
            step_seconds=self._watch.whole_step(self._began),
            part_seconds=part_seconds,
        )


def start_step(
    components: Components,
    step: Step,
    ghosts: Iterable[Ghost],
    seed: int,
    watch: Stopwatch,
    votes: Votes | None = None,
    *,
    measure_noise: bool = True,
) -> StartedStep | None:
    """Make one step; the optimizer must already have the values of this epoch.

    votes: what this rank wants afterwards; nothing by default.

    Returns None when an exact sum did not fit and ghosts are no list, so that they cannot be passed again: nothing has
    changed, and the step must be done again. On an accelerator this may be found out later, by the result.
    """
    optimizer, world = components.optimizer, components.world
    exact, noise_scale = components.exact, components.noise_scale
    if exact is not None and exact.is_new:
        ghosts = list(ghosts)  # the first step is always repeated
    began = time.perf_counter()
    optimizer.zero_grad(set_to_none=True)
    decides_late = components.decides_on_device and not audit_is_due(components.config, step)
    is_late_sum = decides_late and exact is not None and exact.has_shifts
    loss_scale = _loss_scale(components)
    by_ghost = _pass_until_it_fits(
        components, step, ghosts, seed, watch, loss_scale, is_late=is_late_sum, measure_noise=measure_noise
    )
    if by_ghost is None:
        return None

    left_out = exact.judge() if exact is not None and is_late_sum else None  # on the device
    if noise_scale is not None:
        noise_scale.reduce_step()  # before the gradients are unscaled
    components.statistics.reduce_step()
    components.scaler.unscale_(optimizer)
    own_norm = get_total_norm([p.grad for p in components.ddp.parameters() if p.grad is not None], foreach=True)
    exposed_seconds = components.exposed.reader() if world.size > 1 else lambda: 0.0
    if components.device.type == "cpu":
        watch.expose(exposed_seconds())

    # Hosts with other processors or threads may differ in the last bit of the norm; what is decided by it must not.
    main = float(world.is_main)
    numbers = {
        "gradient_norm": own_norm * main,
        "not_finite": ~torch.isfinite(own_norm),
        "repeats": exact.num_repeats * main if exact is not None else 0.0,
        "left_out": left_out if left_out is not None else 0.0,
        **asdict(votes or Votes()),
        **watch.seconds,
    }
    totals = StepTotals(by_ghost, numbers, world.size)
    skip: bool | Tensor = totals["not_finite"] > 0  # on some rank
    if left_out is not None:
        skip = skip | left_out
    if not decides_late:
        skip = bool(skip)  # before anything is changed: an error of the sums comes to light here
    watch.skip()
    if skip is False:
        prepare_step(optimizer)

    # From here on ranks no longer talk in this step: it is made on all that got here, and whole on each of them.
    if exact is not None:
        exact.commit()
    if noise_scale is not None:
        noise_scale.end_step(loss_scale, unless=left_out)
    _apply(components, step, seed, totals["gradient_norm"], skip)
    update_scale(components.scaler, unless=left_out)
    watch.lap("optimizer")
    return StartedStep(components, step, totals, watch, began, exposed_seconds, noise_scale if measure_noise else None)


def _pass_until_it_fits(
    components: Components,
    step: Step,
    ghosts: Iterable[Ghost],
    seed: int,
    watch: Stopwatch,
    loss_scale: float | Tensor,
    *,
    is_late: bool,
    measure_noise: bool,
) -> Tensor | None:
    """The passes of a step, as often as the host finds that exact sums did not fit, and its audit when one is due.

    None: they must be made again, and ghosts are no list. is_late: the host will not know yet, so they are made once.
    """
    exact, noise_scale = components.exact, components.noise_scale
    attempts: Iterable[int] = (0,)
    if exact is not None and is_late:
        exact.begin_step(step.num_ghosts, loss_scale)
    elif exact is not None:
        attempts = exact.attempts(step.num_ghosts, loss_scale, commit=False)
    for attempt in attempts:
        if attempt > 0:
            components.statistics.forget_step()
            if not isinstance(ghosts, list):
                return None
        audit = Audit.if_due(components, step)
        if noise_scale is not None:
            noise_scale.begin_step(measure_noise, step.num_ghosts)
        watch.begin()
        by_ghost = pass_ghosts(components, step, ghosts, seed, watch, audit)
    if audit is not None and exact is not None and exact.fits:
        audit.finish(partial(loss_alone, components, step, seed))
    return by_ghost


def _apply(components: Components, step: Step, seed: int, gradient_norm: Tensor, skip: bool | Tensor) -> None:
    """Let statistics and weights move, unless the step must be left out; a tensor leaves that to the device.

    gradient_norm: the one that all ranks agree on; the gradient is clipped by it.
    """
    if skip is True:
        components.statistics.forget_step()
        return
    unless = skip if isinstance(skip, Tensor) else None
    components.statistics.after_step(unless=unless)
    if clip_norm := components.config.optimizer.clip_norm:
        clip_grads_with_norm_(components.ddp.parameters(), clip_norm, gradient_norm.float())
    # An optimizer may draw random numbers. Ranks left the generator at different ghost batches.
    seed_torch(components.device, seed, step.start_samples)
    if unless is not None:
        step_unless(components.optimizer, unless)
    else:
        components.scaler.step(components.optimizer)
    if components.ema is not None:
        components.ema.update(step.num_samples, unless=unless)


def _loss_scale(components: Components) -> float | Tensor:
    """What losses are multiplied by; on an accelerator it stays there."""
    if components.device.type == "cpu":
        return components.scaler.get_scale()
    return components.scaler.scale(torch.ones((), device=components.device))
