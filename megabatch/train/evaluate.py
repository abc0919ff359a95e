"""Exact evaluation of one network or of several: every image counted once, on any number of workers.

Worker w takes images n * w / W to n * (w + 1) / W. Nothing is padded or repeated, and the counts of all workers are
added up; the sum must be the size of the set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from megabatch.data.batches import Feeding, evaluation_batches
from megabatch.data.sources import Source

__all__ = ["Evaluation", "evaluate", "evaluate_together"]


@dataclass(frozen=True)
class Evaluation:
    """Shares of the validation set, and the plain (unsmoothed) cross-entropy."""

    top1: float
    top5: float
    loss: float
    num_images: int


def evaluate(
    network: nn.Module,
    source: Source,
    image_size: int,
    normalise: Callable[[Tensor], Tensor],
    autocast: Callable[[], torch.autocast],
    images_per_pass: int,
    device: torch.device,
    feeding: Feeding | None = None,
) -> Evaluation:
    """Count top-1 and top-5 hits over the whole source; every worker of the world must call it."""
    alone, _ = evaluate_together([network], source, image_size, normalise, autocast, images_per_pass, device, feeding)
    return alone[0]


@torch.no_grad()
def evaluate_together(
    networks: Sequence[nn.Module],
    source: Source,
    image_size: int,
    normalise: Callable[[Tensor], Tensor],
    autocast: Callable[[], torch.autocast],
    images_per_pass: int,
    device: torch.device,
    feeding: Feeding | None = None,
) -> tuple[list[Evaluation], Evaluation]:
    """Evaluate each network alone, and their ensemble: the average of the probabilities they give."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    begin, end = len(source) * rank // size, len(source) * (rank + 1) // size
    totals = torch.zeros(len(networks) + 1, 4, dtype=torch.float64, device=device)
    modes = [network.training for network in networks]
    for network in networks:
        network.eval()
    batches = evaluation_batches(source, image_size, begin, end, images_per_pass, feeding or Feeding())
    for images, labels_array in batches:
        labels = torch.from_numpy(labels_array).to(device)
        batch = normalise(torch.from_numpy(images))
        probabilities = torch.zeros((), dtype=torch.float64, device=device)
        for row, network in enumerate(networks):
            with autocast():
                logits = network(batch)
            logits = logits.float()
            totals[row] += _counts(logits, F.cross_entropy(logits, labels, reduction="sum"), labels)
            probabilities = probabilities + logits.double().softmax(dim=1)
        probabilities /= len(networks)
        totals[-1] += _counts(probabilities, F.nll_loss(probabilities.log(), labels, reduction="sum"), labels)
    for network, mode in zip(networks, modes, strict=True):
        network.train(mode)
    if size > 1:
        dist.all_reduce(totals)
    found = [_evaluation(row, len(source)) for row in totals.tolist()]
    return found[:-1], found[-1]


def _counts(scores: Tensor, loss: Tensor, labels: Tensor) -> Tensor:
    """Top-1 hits, top-5 hits, the given loss and the number of images."""
    best = scores.topk(min(5, scores.shape[1]), dim=1).indices == labels[:, None]
    number = loss.new_tensor(float(len(labels)))
    return torch.stack([best[:, 0].sum(), best.any(dim=1).sum(), loss, number]).double()


def _evaluation(totals: list[float], num_images: int) -> Evaluation:
    hits1, hits5, loss_sum, count = totals
    assert int(count) == num_images, f"evaluated {count} images of {num_images}"
    return Evaluation(hits1 / count, hits5 / count, loss_sum / count, num_images)
