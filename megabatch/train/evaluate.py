"""Exact evaluation of networks, and exact batch-norm statistics for it, on any number of ranks.

Rank r takes images n * r / W to n * (r + 1) / W. Nothing is padded or repeated, and the counts of all ranks are added
up; the sum must be the size of the set.

Statistics come from ghost batches of one place of the training stream. They are sharded over the ranks as in training
and averaged over all of them: the result is the same on every rank and does not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from megabatch.config import Config
from megabatch.config.data import AugmentConfig
from megabatch.data.augment import Augmentation
from megabatch.data.batches import Feeding, assemble_training, evaluation_batches
from megabatch.data.randomness import stream
from megabatch.data.sources import Source
from megabatch.model.norm import exact_statistics
from megabatch.schedule.batch import shard_range

__all__ = ["Evaluation", "evaluate", "measure_statistics"]


@dataclass(frozen=True)
class Evaluation:
    """Shares of the validation set, and the plain (unsmoothed) cross-entropy."""

    top1: float
    top5: float
    loss: float
    num_images: int


@torch.no_grad()
def evaluate(
    networks: Sequence[nn.Module],
    source: Source,
    image_size: int,
    normalise: Callable[[Tensor], Tensor],
    autocast: Callable[[], torch.autocast],
    images_per_pass: int,
    device: torch.device,
    feeding: Feeding | None = None,
) -> list[Evaluation]:
    """Each network alone, and behind them, if there are several, the average of the probabilities they give.

    Every rank of the world must call it.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    begin, end = len(source) * rank // size, len(source) * (rank + 1) // size
    with_ensemble = len(networks) > 1
    totals = torch.zeros(len(networks) + with_ensemble, 4, dtype=torch.float64, device=device)
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
            if with_ensemble:
                probabilities = probabilities + logits.double().softmax(dim=1)
        if with_ensemble:
            probabilities /= len(networks)
            totals[-1] += _counts(probabilities, F.nll_loss(probabilities.log(), labels, reduction="sum"), labels)
    for network, mode in zip(networks, modes, strict=True):
        network.train(mode)
    if size > 1:
        dist.all_reduce(totals)
    return [_evaluation(row, len(source)) for row in totals.tolist()]


def _counts(scores: Tensor, loss: Tensor, labels: Tensor) -> Tensor:
    """Top-1 hits, top-5 hits, the given loss and the number of images."""
    best = scores.topk(min(5, scores.shape[1]), dim=1).indices == labels[:, None]
    number = loss.new_tensor(float(len(labels)))
    return torch.stack([best[:, 0].sum(), best.any(dim=1).sum(), loss, number]).double()


def _evaluation(totals: list[float], num_images: int) -> Evaluation:
    hits1, hits5, loss_sum, count = totals
    assert int(count) == num_images, f"evaluated {count} images of {num_images}"
    return Evaluation(hits1 / count, hits5 / count, loss_sum / count, num_images)


def measure_statistics(
    network: nn.Module,
    config: Config,
    source: Source,
    normalise: Callable[[Tensor], Tensor],
    *,
    num_ghosts: int,
    augment: AugmentConfig,
    seed: int,
    start_samples: int = 0,
) -> None:
    """Give the network the statistics of `num_ghosts` ghost batches from `start_samples` on; every rank must call it.

    Forward passes run in the precision of the caller's autocast.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    augmentation, size = Augmentation(**augment.model_dump()), config.train.ghost_batch_size
    tolerant = config.data.max_broken_share > 0  # the loader counts broken images when their turn comes

    def batches() -> Iterator[Tensor]:
        for index in shard_range(num_ghosts, world_size, rank):
            epochs, samples = stream(seed, len(source), start_samples + index * size, size)
            images, _ = assemble_training(
                source, augmentation, config.data.image_size, seed, epochs, samples, tolerant=tolerant
            )
            yield normalise(torch.from_numpy(images))

    exact_statistics(network, batches(), 1.0 / num_ghosts, config.norm.variance)
