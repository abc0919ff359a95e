"""One optimizer step: this rank's ghost batches forward and backward, gradients averaged, optimizer stepped.

Each image weighs 1 / images of the step, whichever rank holds it: a ghost batch's loss is its sum over images times
`step.loss_weight`, and DDP's average over ranks makes that the mean. All but a rank's last ghost batch are accumulated
under `no_sync`; the last one sends the buckets.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.utils import get_total_norm

from megabatch.data.loader import Ghost
from megabatch.schedule.batch import Step
from megabatch.train.components import Components
from megabatch.train.metrics import StepResult, Stopwatch

__all__ = ["train_step", "warm_up_pass"]

# Parts whose mean over ranks is known before the optimizer steps.
_SHARED = ("data", "forward", "backward", "communication")


def warm_up_pass(parts: Components) -> None:
    """Go through one synchronised backward pass that leaves no trace in weights or statistics.

    DDP rearranges its buckets after the first such pass. With three or more ranks the arrangement decides in which
    order numbers are added, so a resumed run must begin with the same one as the run that was never interrupted.
    """
    count, size = parts.config.train.ghost_batch_size, parts.config.data.image_size
    images = torch.zeros(count, size, size, parts.train_source.channels, dtype=torch.uint8)
    with parts.statistics.untouched():
        with parts.autocast():
            logits = parts.ddp(parts.normalise(images))
        (logits.float().sum() * 0.0).backward()
    parts.exposed.backward_ended()
    parts.optimizer.zero_grad(set_to_none=True)


def train_step(
    parts: Components,
    step: Step,
    ghosts: Iterable[Ghost],
    seed: int,
    watch: Stopwatch,
    *,
    stop_wanted: bool = False,
    measure_noise: bool = True,
) -> StepResult:
    """Make one step; the optimizer must already have the values of this epoch."""
    begin = time.perf_counter()
    size, smoothing = parts.world.size, parts.config.train.label_smoothing
    num_mine = max(1, len(step.ghosts))
    loss_sum = torch.zeros((), dtype=torch.float64, device=parts.device)
    num_correct = torch.zeros((), dtype=torch.float64, device=parts.device)
    parts.optimizer.zero_grad(set_to_none=True)
    if parts.noise is not None:
        parts.noise.begin_step(measure_noise)
    watch.begin()

    for position, ghost in enumerate(ghosts):
        watch.lap("data")
        synchronise = position == num_mine - 1
        # Dropout and the like depend on the ghost batch, not on the rank that happens to hold it.
        _seed(parts.device, (seed * 0x9E3779B97F4A7C15 + ghost.number) % 2**63)
        images = parts.normalise(ghost.images)
        labels = ghost.labels.to(parts.device, non_blocking=True)
        statistics = parts.statistics.untouched() if ghost.idle else parts.statistics.ghost(1.0 / step.num_ghosts)
        with nullcontext() if synchronise else parts.ddp.no_sync(), statistics:
            with parts.autocast():
                logits = parts.ddp(images)
            loss = F.cross_entropy(logits.float(), labels, label_smoothing=smoothing, reduction="sum")
            watch.lap("forward")
            weight = 0.0 if ghost.idle else step.loss_weight
            parts.scaler.scale(loss * weight).backward()
        if synchronise:
            parts.exposed.backward_ended()
        watch.lap("backward")
        if not ghost.idle:
            loss_sum += loss.detach()
            num_correct += (logits.argmax(dim=1) == labels).sum()
            if parts.noise is not None:
                parts.noise.after_backward(step.ghost_batch_size, step.ghost_batch_size / step.num_samples)
        watch.skip()

    if parts.noise is not None:
        parts.noise.end_step(parts.scaler.get_scale())  # before the gradients are unscaled
    parts.scaler.unscale_(parts.optimizer)
    gradients = [p.grad for p in parts.ddp.parameters() if p.grad is not None]
    own_norm = get_total_norm(gradients, foreach=True).double()
    watch.expose(parts.exposed.seconds() if size > 1 else 0.0)
    totals = torch.stack(
        [
            loss_sum,
            num_correct,
            (~torch.isfinite(own_norm)).double(),
            torch.tensor(float(stop_wanted), dtype=torch.float64, device=parts.device),
            own_norm,  # hosts with other processors or threads may differ in the last bit, decisions must not
            *torch.tensor([watch.seconds[part] for part in _SHARED], dtype=torch.float64).to(parts.device),
        ]
    )
    if size > 1:
        dist.all_reduce(totals)
    loss_total, correct_total, num_not_finite, stop_total, norm_total, *seconds_total = totals.tolist()
    seconds = {part: total / size for part, total in zip(_SHARED, seconds_total, strict=True)}
    finite = num_not_finite == 0  # on every rank
    watch.skip()
    if finite:
        parts.statistics.after_step()
        parts.scaler.step(parts.optimizer)
    else:
        parts.statistics.forget_step()
    parts.scaler.update()
    watch.lap("optimizer")
    watch.end()
    measured = parts.noise if measure_noise else None
    known = math.isfinite(watch.seconds["forward"])
    return StepResult(
        num_samples=step.num_samples,
        loss=loss_total / step.num_samples,
        top1=correct_total / step.num_samples,
        gradient_norm=norm_total / size,
        applied=finite,
        stop_wanted=stop_total > 0,
        noise=measured.average.sample() if measured and measured.measuring and finite else None,
        noise_scale=measured.scale if measured else None,
        data_seconds=seconds["data"],
        communication_seconds=seconds["communication"],
        step_seconds=time.perf_counter() - begin,
        forward_seconds=seconds["forward"] if known else math.nan,
        backward_seconds=seconds["backward"] if known else math.nan,
        optimizer_seconds=watch.seconds["optimizer"],
    )


def _seed(device: torch.device, seed: int) -> None:
    """Seed what a forward pass uses; `torch.manual_seed` walks through every kind of device and takes far longer."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
