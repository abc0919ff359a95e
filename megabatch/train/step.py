"""One optimizer step: this worker's ghost batches forward and backward, gradients averaged, optimizer stepped.

Each image weighs 1 / images of the step, whichever worker holds it: a ghost batch's loss is its sum over images
times workers / images, and DDP's average over workers takes the workers out again. All but a worker's last ghost
batch are accumulated under `no_sync`; the last one sends the buckets.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.utils import get_total_norm

from megabatch.data.loader import Ghost
from megabatch.schedule.batch import Step, shard_range
from megabatch.schedule.noise import NoiseSample
from megabatch.train.build import Workbench

__all__ = ["StepResult", "train_step", "warm_up_pass"]

# Parts whose mean over workers is known before the optimizer steps.
_SHARED = ("data", "forward", "backward", "communication")


@dataclass(frozen=True)
class StepResult:
    """What a step did, the same on every worker. Seconds are means over workers, except the step's own."""

    loss: float
    top1: float
    gradient_norm: float
    applied: bool  # False when the gradient was not finite and the optimizer left the weights alone
    stop_wanted: bool  # some worker was asked to stop
    noise: NoiseSample | None  # smoothed noise and signal of the gradient, when this step was measured
    noise_scale: float | None  # smoothed, in images; None when it is not measured, or not known
    data_seconds: float
    communication_seconds: float
    step_seconds: float
    forward_seconds: float = math.nan  # NaN where the host's clock does not tell
    backward_seconds: float = math.nan
    optimizer_seconds: float = math.nan  # the main rank's own: every worker does the same

    @property
    def compute_seconds(self) -> float:
        return max(0.0, self.step_seconds - self.data_seconds - self.communication_seconds)


def warm_up_pass(bench: Workbench) -> None:
    """Go through one synchronised backward pass that leaves no trace in weights or statistics.

    DDP rearranges its buckets after the first such pass. With three or more workers the arrangement decides in which
    order numbers are added, so a resumed run must begin with the same one as the run that was never interrupted.
    """
    size = bench.config.data.image_size
    images = torch.zeros(
        bench.config.train.ghost_batch_size, size, size, bench.train_source.channels, dtype=torch.uint8
    )
    with bench.statistics.untouched():
        with bench.autocast():
            logits = bench.ddp(bench.normalise(images))
        (logits.float().sum() * 0.0).backward()
    bench.exposed.backward_ended()
    bench.optimizer.zero_grad(set_to_none=True)


def _seed(device: torch.device, seed: int) -> None:
    """Seed what a forward pass uses; `torch.manual_seed` walks through every kind of device and takes far longer."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def train_step(
    bench: Workbench, step: Step, ghosts: Iterable[Ghost], seed: int, stop_wanted: bool, measure_noise: bool = True
) -> StepResult:
    """Make one step; `optimizer` must already have the rates of this epoch."""
    begin = time.perf_counter()
    size, smoothing = bench.world.size, bench.config.train.label_smoothing
    num_mine = max(1, len(shard_range(step.num_ghosts, size, bench.world.rank)))
    loss_sum = torch.zeros((), dtype=torch.float64, device=bench.device)
    num_correct = torch.zeros((), dtype=torch.float64, device=bench.device)
    noise, watch = bench.noise, bench.watch
    bench.optimizer.zero_grad(set_to_none=True)
    if noise is not None:
        noise.begin_step(measure_noise)
    watch.begin()

    for position, ghost in enumerate(ghosts):
        watch.lap("data")
        synchronise = position == num_mine - 1
        # Dropout and the like depend on the ghost batch, not on the worker that happens to hold it.
        _seed(bench.device, (seed * 0x9E3779B97F4A7C15 + ghost.number) % 2**63)
        images = bench.normalise(ghost.images)
        labels = ghost.labels.to(bench.device, non_blocking=True)
        with (
            nullcontext() if synchronise else bench.ddp.no_sync(),
            bench.statistics.untouched() if ghost.idle else nullcontext(),
        ):
            with bench.autocast():
                logits = bench.ddp(images)
            loss = F.cross_entropy(logits.float(), labels, label_smoothing=smoothing, reduction="sum")
            watch.lap("forward")
            weight = 0.0 if ghost.idle else size / step.num_samples
            bench.scaler.scale(loss * weight).backward()
        if synchronise:
            bench.exposed.backward_ended()
        watch.lap("backward")
        if not ghost.idle:
            bench.statistics.after_ghost(1.0 / step.num_ghosts)
            loss_sum += loss.detach()
            num_correct += (logits.argmax(dim=1) == labels).sum()
            if noise is not None:
                noise.after_backward(step.ghost_batch_size, step.ghost_batch_size / step.num_samples)
        watch.skip()

    loss_scale = bench.scaler.get_scale()
    bench.scaler.unscale_(bench.optimizer)
    gradients = [p.grad for p in bench.ddp.parameters() if p.grad is not None]
    own_norm = get_total_norm(gradients, foreach=True).double()
    watch.expose(bench.exposed.seconds() if size > 1 else 0.0)
    totals = torch.stack(
        [
            loss_sum,
            num_correct,
            (~torch.isfinite(own_norm)).double(),
            torch.tensor(float(stop_wanted), dtype=torch.float64, device=bench.device),
            own_norm,  # hosts with other processors or threads may differ in the last bit, decisions must not
            *torch.tensor([watch.seconds[part] for part in _SHARED], dtype=torch.float64).to(bench.device),
        ]
    )
    if noise is not None:
        totals = torch.cat([totals, noise.local_sums()])  # no all-reduce of their own
    if size > 1:
        dist.all_reduce(totals)
    loss_total, correct_total, num_not_finite, stop_total, norm_total, *others = totals.tolist()
    gradient_norm = norm_total / size
    seconds = {part: total / size for part, total in zip(_SHARED, others, strict=False)}
    sums = others[len(_SHARED) :]
    finite = num_not_finite == 0  # on every worker
    watch.skip()
    if finite:
        bench.statistics.after_step()
        bench.scaler.step(bench.optimizer)
    else:
        bench.statistics.forget_bad_step()
    if noise is not None and finite:
        noise.observe(sums, gradient_norm**2, loss_scale)
    bench.scaler.update()
    watch.lap("optimizer")
    watch.end()
    known = math.isfinite(watch.seconds["forward"])
    return StepResult(
        loss=loss_total / step.num_samples,
        top1=correct_total / step.num_samples,
        gradient_norm=gradient_norm,
        applied=finite,
        stop_wanted=stop_total > 0,
        noise=noise.average.sample() if noise is not None and noise.measuring and finite else None,
        noise_scale=noise.scale if noise is not None and measure_noise else None,
        data_seconds=seconds["data"],
        communication_seconds=seconds["communication"],
        step_seconds=time.perf_counter() - begin,
        forward_seconds=seconds["forward"] if known else math.nan,
        backward_seconds=seconds["backward"] if known else math.nan,
        optimizer_seconds=watch.seconds["optimizer"],
    )
