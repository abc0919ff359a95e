"""One optimizer step: this rank's ghost batches forward and backward, gradients averaged, optimizer stepped.

Each image weighs 1 / images of the step, whichever rank holds it. All but a rank's last ghost batch are accumulated
under `no_sync`; the last one sends the buckets. With exact sums each ghost batch's mean gradient becomes integers, and
the hook gives back the mean over the step's ghost batches. With sums in floats a ghost batch's loss is its sum over
images times `step.loss_weight`, and DDP's average over ranks makes that the mean.

What is logged and decided has the same bits on any number of ranks: each ghost batch has its own place in one small
message, other ranks add zero to it, and every rank sums up the places in the same order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from megabatch.comm.exact import ExactSums
from megabatch.comm.transfer import Reading, upload
from megabatch.data.loader import Ghost, Mixed
from megabatch.optim.shampoo import Shampoo
from megabatch.optim.skip import step_unless, update_scale
from megabatch.schedule.batch import Step
from megabatch.schedule.noise import NoiseSample
from megabatch.train.audit import Audit
from megabatch.train.components import Components
from megabatch.train.graph import PassKind
from megabatch.train.metrics import PARTS, Stopwatch


@dataclass(frozen=True)
class StepResult:
    """What a step did, the same on every rank but for the seconds of the step and of the optimizer."""

    num_samples: int
    loss: float
    top1: float
    gradient_norm: float  # before it is clipped
    repeated_steps: int  # steps so far that were done again because an exact sum did not fit
    applied: bool  # False when the gradient was not finite and the optimizer left the weights alone
    stop_wanted: bool  # some rank was asked to stop
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


def warm_up_pass(components: Components) -> None:
    """Go through one synchronised backward pass that leaves no trace in weights or statistics.

    DDP rearranges its buckets after the first such pass. With three or more ranks the arrangement decides in which
    order numbers are added, so a resumed run must begin with the same one as the run that was never interrupted.
    """
    count, size = components.config.train.ghost_batch_size, components.config.data.image_size
    if components.exact is not None:
        components.exact.begin_step(1)
    images = torch.zeros(count, size, size, components.train_source.channels, dtype=torch.uint8)
    with components.statistics.untouched():
        with components.autocast():
            logits = components.ddp(components.normalise(images))
        (logits.float().sum() * 0.0).backward()
    components.pass_was_sent()
    components.optimizer.zero_grad(set_to_none=True)


class StartedStep:
    """A step that the device may still be working on. Read the results of steps in their order.

    When one gives None, an exact sum did not fit: it has left no trace, nor have those that were started since. Call
    `drop` for each of these, and go on with the one that did not fit.
    """

    def __init__(self, read: Callable[[], StepResult | None], drop: Callable[[], None]) -> None:
        self._read, self.drop = read, drop

    def result(self) -> StepResult | None:
        """What the step did; waits until it is done."""
        return self._read()


def train_step(components: Components, step: Step, *args: Any, **kwargs: Any) -> StepResult | None:
    """`start_step`, and its result at once."""
    started = start_step(components, step, *args, **kwargs)
    return started.result() if started is not None else None


def start_step(
    components: Components,
    step: Step,
    ghosts: Iterable[Ghost],
    seed: int,
    watch: Stopwatch,
    *,
    stop_wanted: bool = False,
    ask_wanted: bool = False,
    measure_noise: bool = True,
) -> StartedStep | None:
    """Make one step; the optimizer must already have the values of this epoch.

    Returns None when an exact sum did not fit and ghosts are no list, so that they cannot be passed again: nothing has
    changed, and the step must be done again. On an accelerator this may be found out later, by the result.
    """
    begin = time.perf_counter()
    optimizer, scaler = components.optimizer, components.scaler
    noise_scale, exact = components.noise_scale, components.exact
    optimizer.zero_grad(set_to_none=True)
    audit = Audit.if_due(components, step)
    on_device = components.decides_on_device and audit is None
    loss_scale = _loss_scale(components)
    is_late_sum = on_device and exact is not None and exact.has_shifts
    for attempt in _attempts(exact, step.num_ghosts, loss_scale, is_late=is_late_sum):
        if attempt > 0:
            components.statistics.forget_step()
            audit = Audit.if_due(components, step)
            if not isinstance(ghosts, list):
                return None
        if noise_scale is not None:
            noise_scale.begin_step(measure_noise, step.num_ghosts)
        watch.begin()
        by_ghost = _pass_ghosts(components, step, ghosts, seed, watch, audit)
    if audit is not None and exact is not None and exact.fits:
        weight, network = 1.0 / step.ghost_batch_size, components.passed

        def loss_of(ghost: Ghost) -> Tensor:
            _seed_ghost(components, ghost, seed)
            return scaler.scale(_forward(components, network, ghost.images, ghost.labels, ghost.mixed)[1] * weight)

        audit.finish(loss_of)
    left_out = exact.judge() if is_late_sum and exact is not None else None  # on the device
    if noise_scale is not None:
        noise_scale.reduce_step()  # before the gradients are unscaled
    components.statistics.reduce_step()
    scaler.unscale_(optimizer)
    own_norm = get_total_norm([p.grad for p in components.ddp.parameters() if p.grad is not None], foreach=True)
    exposed_seconds = components.exposed.reader() if components.world.size > 1 else lambda: 0.0
    on_cpu = components.device.type == "cpu"
    if on_cpu:
        watch.expose(exposed_seconds())
    # Hosts with other processors or threads may differ in the last bit of the norm; what is decided by it must not.
    main = float(components.world.is_main)
    numbers = [own_norm * main, ~torch.isfinite(own_norm)]
    if exact is not None:
        numbers += [exact.num_repeats * main, torch.zeros_like(own_norm) if left_out is None else left_out]
    seconds = watch.seconds.values()
    totals = _sum_over_ranks(components, by_ghost, numbers, [stop_wanted, ask_wanted, *seconds])
    of_ghosts = by_ghost.numel()
    skip: bool | Tensor = totals[of_ghosts + 1] > 0  # not finite on some rank
    if left_out is not None:
        skip = skip | left_out
    if not on_device:
        skip = bool(skip)  # before anything is changed: an error of the sums comes to light here
    watch.skip()
    if skip is False and isinstance(optimizer, Shampoo):
        optimizer.gather_roots()

    # From here on ranks no longer talk in this step: it is made on all that got here, and whole on each of them.
    reading = Reading(totals)
    if exact is not None:
        exact.commit()
    if noise_scale is not None:
        noise_scale.end_step(loss_scale, unless=left_out)
    _apply(components, step, seed, totals[of_ghosts], skip)
    update_scale(scaler, unless=left_out)
    watch.lap("optimizer")
    counts, optimizer_seconds = watch.end(), watch.seconds["optimizer"]
    measured = noise_scale if measure_noise else None
    is_measured, num_measured = measured is not None and measured.measuring, measured.num_measured if measured else 0

    def drop() -> None:
        if measured is not None:
            measured.forget_step()

    def read() -> StepResult | None:
        sums = reading.list()
        losses_and_hits, (gradient_norm, num_not_finite, *rest) = sums[:of_ghosts], sums[of_ghosts:]
        repeats, num_left_out, *rest = rest if exact is not None else [0, 0, *rest]
        num_stops, num_asks, *seconds = rest
        if num_left_out:
            assert exact is not None
            drop()
            exact.again()
            return None
        means = {part: total / components.world.size for part, total in zip(PARTS, seconds, strict=True)}
        if not on_cpu:
            means["communication"] = exposed_seconds()
            watch.sums["communication"] += counts * means["communication"]
        if measured:
            measured.settle(num_measured)
        is_finite = num_not_finite == 0
        return StepResult(
            num_samples=step.num_samples,
            loss=math.fsum(losses_and_hits[::2]) / step.num_samples,
            top1=math.fsum(losses_and_hits[1::2]) / step.num_samples,
            gradient_norm=gradient_norm,
            applied=is_finite,
            repeated_steps=int(repeats),
            stop_wanted=num_stops > 0,
            ask_wanted=num_asks > 0,
            noise_average=measured.average.sample() if measured and is_measured and is_finite else None,
            noise_scale=measured.scale if measured else None,
            step_seconds=watch.whole_step(begin),
            part_seconds={**means, "optimizer": optimizer_seconds},  # every rank does the same there
        )

    return StartedStep(read, drop)


def _attempts(exact: ExactSums | None, num_ghosts: int, loss_scale: float | Tensor, *, is_late: bool) -> Iterable[int]:
    """A step's passes are made once, or with exact sums as often as the host finds that they did not fit."""
    if exact is None:
        return (0,)
    if is_late:
        exact.begin_step(num_ghosts, loss_scale)
        return (0,)
    return exact.attempts(num_ghosts, loss_scale, commit=False)


def _apply(components: Components, step: Step, seed: int, gradient_norm: Tensor, skip: bool | Tensor) -> None:
    """Let statistics and weights move, unless the step must be left out; a tensor leaves that to the device.

    gradient_norm: the one that all ranks agree on; the gradient is clipped by it.
    """
    if skip is True:
        components.statistics.forget_step()
        return
    components.statistics.after_step(unless=skip if isinstance(skip, Tensor) else None)
    if clip_norm := components.config.optimizer.clip_norm:
        clip_grads_with_norm_(components.ddp.parameters(), clip_norm, gradient_norm.float())
    # An optimizer may draw random numbers. Ranks left the generator at different ghost batches.
    _seed(components.device, (seed * 0x9E3779B97F4A7C15 + step.start_samples) % 2**63)
    unless = skip if isinstance(skip, Tensor) else None
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


def _pass_ghosts(
    components: Components,
    step: Step,
    ghosts: Iterable[Ghost],
    seed: int,
    watch: Stopwatch,
    audit: Audit | None,
) -> Tensor:
    """Forward and backward of this rank's ghost batches; returns the loss and the right answers of each of the step."""
    device, exact, noise_scale = components.device, components.exact, components.noise_scale
    share = step.ghost_batch_size / step.num_samples
    weight = step.loss_weight if exact is None else 1.0 / step.ghost_batch_size
    by_ghost = torch.zeros(step.num_ghosts, 2, dtype=torch.float64, device=device)
    graphs = components.graphs
    if graphs is not None:
        graphs.begin_step()
        is_watched = audit is not None or (noise_scale is not None and noise_scale.measuring)
        graphs = graphs if graphs.are_ready and not is_watched else None
    components.exposed.is_captured = graphs is not None
    for position, ghost in enumerate(ghosts):
        watch.lap("data")
        synchronise = position == max(1, len(step.ghosts)) - 1
        place = step.first_ghost + position
        if audit is not None:
            audit.pass_begins(ghost, place)
        own_weight = 0.0 if ghost.idle else weight
        _seed_ghost(components, ghost, seed)
        if graphs is not None:
            kind = PassKind(ghost.images.shape, position == 0, synchronise, ghost.idle)
            body = partial(_graphed_pass, components, kind)
            found = graphs.run(kind, ghost.images, ghost.labels, own_weight, body)
            if exact is not None:
                exact.was_added(sent=synchronise)
        else:
            found = _pass(
                components, ghost.images, ghost.labels, ghost.mixed, own_weight, synchronise, ghost.idle, watch
            )
            watch.lap("backward")
            if noise_scale is not None and not ghost.idle:
                noise_scale.after_backward(step.ghost_batch_size, share, place)
            if exact is not None:
                exact.add_ghost()
        if not ghost.idle:
            by_ghost[place] = found
        watch.skip()
    return by_ghost


def _pass(
    components: Components,
    images: Tensor,
    labels: Tensor,
    mixed: Mixed | None,
    weight: float | Tensor,
    synchronise: bool,
    idle: bool,
    watch: Stopwatch | None,
) -> Tensor:
    """Forward and backward of a ghost batch; returns its loss and the number of right answers."""
    collecting = components.statistics.untouched() if idle else components.statistics.ghost()
    with nullcontext() if synchronise else components.ddp.no_sync(), collecting:
        hits, loss = _forward(components, components.ddp, images, labels, mixed)
        if watch is not None:
            watch.lap("forward")
        components.scaler.scale(loss * weight).backward()
    if synchronise:
        components.pass_was_sent()
    return torch.stack([loss.detach(), hits])


def _graphed_pass(components: Components, kind: PassKind, images: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """All that a pass does on the device, with everything that changes from pass to pass in tensors."""
    found = _pass(components, images, labels, None, weight, kind.is_sent, kind.is_idle, None)
    if components.exact is not None:
        components.exact.add_ghost()
    return found


def _forward(
    components: Components, network: nn.Module, images: Tensor, labels: Tensor, mixed: Mixed | None
) -> tuple[Tensor, Tensor]:
    """How many images of a ghost batch the network gets right, and the sum of their losses."""
    labels = labels.to(components.device, non_blocking=True)
    with components.autocast():
        logits = network(components.normalise(images))
    hits, logits = (logits.argmax(dim=1) == labels).sum(), logits.float()
    smoothing = components.config.train.label_smoothing
    if mixed is None:
        return hits, F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
    others, shares = (one.to(components.device, non_blocking=True) for one in (mixed.labels, mixed.shares))
    own, other = (F.cross_entropy(logits, of, label_smoothing=smoothing, reduction="none") for of in (labels, others))
    return hits, (shares * own + (1.0 - shares) * other).sum()


def _sum_over_ranks(
    components: Components, table: Tensor, on_device: Sequence[Tensor], on_host: Sequence[float]
) -> Tensor:
    """The sums over all ranks of a table and of a few numbers behind it, in one message."""
    host = upload(on_host, components.device)
    totals = torch.cat([table.reshape(-1), torch.stack([number.double() for number in on_device]), host])
    if components.world.size > 1:
        dist.all_reduce(totals)
    return totals


def _seed_ghost(components: Components, ghost: Ghost, seed: int) -> None:
    """Dropout and the like depend on the ghost batch, not on the rank that happens to hold it."""
    _seed(components.device, (seed * 0x9E3779B97F4A7C15 + ghost.number) % 2**63)


def _seed(device: torch.device, seed: int) -> None:
    """Seed what a forward pass uses; `torch.manual_seed` walks through every kind of device and takes far longer."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
