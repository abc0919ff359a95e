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
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from megabatch.comm.exact import Verdict
from megabatch.data.loader import Ghost
from megabatch.optim.shampoo import Shampoo
from megabatch.schedule.batch import Step
from megabatch.schedule.noise import NoiseSample
from megabatch.train.audit import Audit
from megabatch.train.components import Components
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
            "compute_seconds": max(0.0, self.step_seconds - waiting),
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
    components.exposed.backward_ended()
    components.optimizer.zero_grad(set_to_none=True)


def train_step(
    components: Components,
    step: Step,
    ghosts: Iterable[Ghost],
    seed: int,
    watch: Stopwatch,
    *,
    stop_wanted: bool = False,
    ask_wanted: bool = False,
    measure_noise: bool = True,
) -> StepResult | None:
    """Make one step; the optimizer must already have the values of this epoch.

    Returns None when an exact sum did not fit: nothing has changed, and the step must be done again.
    """
    begin = time.perf_counter()
    optimizer, scaler, noise_scale = components.optimizer, components.scaler, components.noise_scale
    optimizer.zero_grad(set_to_none=True)
    if noise_scale is not None:
        noise_scale.begin_step(measure_noise, step.num_ghosts)
    if components.exact is not None:
        components.exact.begin_step(step.num_ghosts, scaler.get_scale())
    watch.begin()
    audit = Audit.if_due(components, step)
    by_ghost = _pass_ghosts(components, step, ghosts, seed, watch, audit)
    verdict = components.exact.end_step() if components.exact is not None else None
    if verdict == Verdict.REPEAT:
        components.statistics.forget_step()
        return None
    if audit is not None and verdict == Verdict.FITS:
        weight, network = 1.0 / step.ghost_batch_size, components.ddp.module
        audit.finish(lambda ghost: scaler.scale(_forward(components, network, ghost, seed)[1] * weight))
    if noise_scale is not None:
        noise_scale.reduce_step()  # before the gradients are unscaled
    components.statistics.reduce_step()
    loss_scale = scaler.get_scale()
    scaler.unscale_(optimizer)
    own_norm = get_total_norm([p.grad for p in components.ddp.parameters() if p.grad is not None], foreach=True)
    watch.expose(components.exposed.seconds() if components.world.size > 1 else 0.0)
    # Hosts with other processors or threads may differ in the last bit of the norm; what is decided by it must not.
    norm = own_norm * float(components.world.is_main)
    losses_and_hits, [gradient_norm, num_not_finite, num_stops, num_asks, *seconds] = _sum_over_ranks(
        components, by_ghost, [norm, ~torch.isfinite(own_norm)], [stop_wanted, ask_wanted, *watch.seconds.values()]
    )
    is_finite = num_not_finite == 0  # on every rank
    watch.skip()
    if is_finite and isinstance(optimizer, Shampoo):
        optimizer.gather_roots()

    # From here on ranks no longer talk in this step: it is made on all that got here, and whole on each of them.
    if components.exact is not None:
        components.exact.commit()
    if noise_scale is not None:
        noise_scale.end_step(loss_scale)
    if is_finite:
        components.statistics.after_step()
        _step_optimizer(components, step, seed, gradient_norm)
    else:
        components.statistics.forget_step()
    scaler.update()
    if components.ema is not None and is_finite:
        components.ema.update(step.num_samples)
    watch.lap("optimizer")
    watch.end()

    measured = noise_scale if measure_noise else None
    means = {part: total / components.world.size for part, total in zip(PARTS, seconds, strict=True)}
    return StepResult(
        num_samples=step.num_samples,
        loss=math.fsum(losses_and_hits[::2]) / step.num_samples,
        top1=math.fsum(losses_and_hits[1::2]) / step.num_samples,
        gradient_norm=gradient_norm,
        applied=is_finite,
        repeated_steps=components.exact.repeats if components.exact is not None else 0,
        stop_wanted=num_stops > 0,
        ask_wanted=num_asks > 0,
        noise_average=measured.average.sample() if measured and measured.measuring and is_finite else None,
        noise_scale=measured.scale if measured else None,
        step_seconds=time.perf_counter() - begin,
        part_seconds={**means, "optimizer": watch.seconds["optimizer"]},  # every rank does the same there
    )


def _step_optimizer(components: Components, step: Step, seed: int, gradient_norm: float) -> None:
    """Clip the gradient, whose norm all ranks agree on, and let the optimizer step."""
    if clip_norm := components.config.optimizer.clip_norm:
        norm = torch.tensor(gradient_norm, device=components.device)
        clip_grads_with_norm_(components.ddp.parameters(), clip_norm, norm)
    # An optimizer may draw random numbers. Ranks left the generator at different ghost batches.
    _seed(components.device, (seed * 0x9E3779B97F4A7C15 + step.start_samples) % 2**63)
    components.scaler.step(components.optimizer)


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
    for position, ghost in enumerate(ghosts):
        watch.lap("data")
        synchronise = position == max(1, len(step.ghosts)) - 1
        place = step.first_ghost + position
        if audit is not None:
            audit.pass_begins(ghost, place)
        statistics = components.statistics
        collecting = statistics.untouched() if ghost.idle else statistics.ghost()
        with nullcontext() if synchronise else components.ddp.no_sync(), collecting:
            hits, loss = _forward(components, components.ddp, ghost, seed)
            watch.lap("forward")
            components.scaler.scale(loss * (0.0 if ghost.idle else weight)).backward()
        if synchronise:
            components.exposed.backward_ended()
        watch.lap("backward")
        if not ghost.idle:
            by_ghost[place] = torch.stack([loss.detach(), hits])
            if noise_scale is not None:
                noise_scale.after_backward(step.ghost_batch_size, share, place)
        if exact is not None:
            exact.add_ghost()
        watch.skip()
    return by_ghost


def _forward(components: Components, network: nn.Module, ghost: Ghost, seed: int) -> tuple[Tensor, Tensor]:
    """How many images of a ghost batch the network gets right, and the sum of their losses."""
    # Dropout and the like depend on the ghost batch, not on the rank that happens to hold it.
    _seed(components.device, (seed * 0x9E3779B97F4A7C15 + ghost.number) % 2**63)
    images, labels = components.normalise(ghost.images), ghost.labels.to(components.device, non_blocking=True)
    with components.autocast():
        logits = network(images)
    smoothing = components.config.train.label_smoothing
    loss = F.cross_entropy(logits.float(), labels, label_smoothing=smoothing, reduction="sum")
    return (logits.argmax(dim=1) == labels).sum(), loss


def _sum_over_ranks(
    components: Components, table: Tensor, on_device: Sequence[Tensor], on_host: Sequence[float]
) -> tuple[list[float], list[float]]:
    """The sums over all ranks of a table and of a few numbers, in one message."""
    host = torch.tensor(on_host, dtype=torch.float64).to(components.device)
    totals = torch.cat([table.reshape(-1), torch.stack([number.double() for number in on_device]), host])
    if components.world.size > 1:
        dist.all_reduce(totals)
    sums: list[float] = totals.tolist()
    return sums[: table.numel()], sums[table.numel() :]


def _seed(device: torch.device, seed: int) -> None:
    """Seed what a forward pass uses; `torch.manual_seed` walks through every kind of device and takes far longer."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
