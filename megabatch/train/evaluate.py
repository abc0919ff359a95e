"""Exact evaluation: every picture counted once, on any number of workers.

Worker w takes pictures n * w / W to n * (w + 1) / W. Nothing is padded or repeated, and the counts of all workers are
added up; the sum must be the size of the set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from megabatch.data.assemble import assemble_evaluation
from megabatch.data.sources import Source

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True)
class Evaluation:
    """Shares of the validation set, and the plain (unsmoothed) cross-entropy."""

    top1: float
    top5: float
    loss: float
    num_pictures: int


@torch.no_grad()
def evaluate(
    network: nn.Module,
    source: Source,
    image_size: int,
    normalise: Callable[[torch.Tensor], torch.Tensor],
    autocast: Callable[[], torch.autocast],
    pictures_per_pass: int,
    device: torch.device,
) -> Evaluation:
    """Count top-1 and top-5 hits over the whole source; every worker of the world must call it."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    begin, end = len(source) * rank // size, len(source) * (rank + 1) // size
    totals = torch.zeros(4, dtype=torch.float64, device=device)
    was_training = network.training
    network.eval()
    for start in range(begin, end, pictures_per_pass):
        indices = np.arange(start, min(end, start + pictures_per_pass))
        pictures, labels_array = assemble_evaluation(source, image_size, indices)
        labels = torch.from_numpy(labels_array).to(device)
        with autocast():
            logits = network(normalise(torch.from_numpy(pictures)))
        logits = logits.float()
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
        loss = F.cross_entropy(logits, labels, reduction="sum")
        totals[:3] += torch.stack([best[:, 0].sum(), best.any(dim=1).sum(), loss])
        totals[3] += len(indices)
    network.train(was_training)
    if size > 1:
        dist.all_reduce(totals)
    hits1, hits5, loss_sum, count = totals.tolist()
    assert int(count) == len(source), f"evaluated {count} pictures of {len(source)}"
    return Evaluation(hits1 / count, hits5 / count, loss_sum / count, int(count))
