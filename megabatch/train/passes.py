"""Passes of this rank's ghost batches: forward, loss, backward.

Each image weighs 1 / images of the step, whichever rank holds it. All but a rank's last ghost batch are accumulated
under `no_sync`; the last one sends the buckets. With exact sums each ghost batch's mean gradient becomes integers, and
the hook gives back the mean over the step's ghost batches. With sums in floats a ghost batch's loss is its sum over
images times `step.loss_weight`, and DDP's average over ranks makes that the mean.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megabatch.data.loader import Ghost, Mixed
from megabatch.schedule.batch import Step
from megabatch.train.audit import Audit
from megabatch.train.components import Components
from megabatch.train.graph import PassKind, kinds_of
from megabatch.train.metrics import Stopwatch


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


def pass_ghosts(
    components: Components, step: Step, ghosts: Iterable[Ghost], seed: int, watch: Stopwatch, audit: Audit | None
) -> Tensor:
    """Forward and backward of this rank's ghost batches; returns the loss and the right answers of each of the step."""
    exact, noise_scale, graphs = components.exact, components.noise_scale, components.graphs
    weight = step.loss_weight if exact is None else 1.0 / step.ghost_batch_size
    by_ghost = torch.zeros(step.num_ghosts, 2, dtype=torch.float64, device=components.device)
    for position, ghost in enumerate(ghosts):
        watch.lap("data")
        if position == 0:
            kinds = kinds_of(len(step.ghosts), ghost.images.shape, ghost.idle)
            is_watched = audit is not None or (noise_scale is not None and noise_scale.measuring)
            graphs = graphs if graphs is not None and graphs.take_step(kinds, is_watched) else None
            components.exposed.is_captured = graphs is not None
        place, kind = step.first_ghost + position, kinds[position]
        own_weight = 0.0 if ghost.idle else weight
        if audit is not None:
            audit.pass_begins(ghost, place)
        seed_torch(components.device, seed, ghost.number)
        body = partial(_pass, components, step, place, kind, watch)
        if graphs is None:
            found = body(ghost.images, ghost.labels, own_weight, ghost.mixed)
        else:
            found = graphs.run(kind, ghost.images, ghost.labels, own_weight, body)
            if exact is not None:
                exact.was_added(sent=kind.is_sent)
        if not ghost.idle:
            by_ghost[place] = found
        watch.skip()
    return by_ghost


def loss_alone(components: Components, step: Step, seed: int, ghost: Ghost) -> Tensor:
    """The loss of a ghost batch as exact sums take its gradient, by a forward pass that DDP does not see."""
    seed_torch(components.device, seed, ghost.number)
    _, loss = _forward(components, components.passed, ghost.images, ghost.labels, ghost.mixed)
    return components.scaler.scale(loss * (1.0 / step.ghost_batch_size))


def seed_torch(device: torch.device, seed: int, number: int) -> None:
    """Seed what draws random numbers by what it is for, a ghost batch for example, not by the rank that computes it.

    `torch.manual_seed` walks through every kind of device and takes far longer.
    """
    key = (seed * 0x9E3779B97F4A7C15 + number) % 2**63
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.manual_seed(key)


def _pass(
    components: Components,
    step: Step,
    place: int,
    kind: PassKind,
    watch: Stopwatch,
    images: Tensor,
    labels: Tensor,
    weight: float | Tensor,
    mixed: Mixed | None = None,
) -> Tensor:
    """Forward and backward of the ghost batch at `place` in the step; returns its loss and its right answers.

    A graph holds all that this does on the device; what changes from pass to pass is in the tensors.
    """
    collecting = components.statistics.untouched() if kind.is_idle else components.statistics.ghost()
    with nullcontext() if kind.is_sent else components.ddp.no_sync(), collecting:
        hits, loss = _forward(components, components.ddp, images, labels, mixed)
        watch.lap("forward")
        components.scaler.scale(loss * weight).backward()
    if kind.is_sent:
        components.pass_was_sent()
    watch.lap("backward")
    if components.noise_scale is not None:
        components.noise_scale.after_backward(step.ghost_batch_size, step.ghost_weight, place)
    if components.exact is not None:
        components.exact.add_ghost()
    return torch.stack([loss.detach(), hits])


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
