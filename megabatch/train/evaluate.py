"""Exact evaluation on any number of ranks, of the network in training or of others.

Ranks share the passes of `train.evaluation_batch_size` images. Nothing is padded or repeated, and the counts of all
passes are added up; the sum must be the size of the set. A pass is the same on any number of ranks, and so are its
bits.

Exact batch-norm statistics come from ghost batches of one place of the training stream. They are sharded over the ranks
as in training and averaged over all ghost batches: every rank gets the same, and their number does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from megabatch.comm.transfer import send
from megabatch.config import Config
from megabatch.config.data import AugmentConfig
from megabatch.data.augment import Augmentation
from megabatch.data.batches import LoaderSettings, assemble_training, evaluation_batches
from megabatch.data.randomness import sample_stream
from megabatch.data.sources import Source
from megabatch.model.norm import exact_statistics
from megabatch.schedule.batch import shard_range
from megabatch.train.components import Components, autocast_of
from megabatch.train.phases import TrainingPhase

GHOSTS_FOR_STATISTICS = 32  # when the recipe itself does not say


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
    config: Config,
    normalise: Callable[[Tensor], Tensor],
    feeding: LoaderSettings | None = None,
    each: Tensor | None = None,
) -> list[Evaluation]:
    """Each network alone, and behind them, if there are several, the average of the probabilities they give.

    Every rank of the world must call it.
    each: float64 zeros [images, 2] on the device; takes the last network's class and its probability for every image.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    image_size, images_per_pass = config.data.image_size, config.train.evaluation_batch_size
    device = next(networks[0].parameters()).device
    num_passes = -(-len(source) // images_per_pass)
    mine = shard_range(num_passes, size, rank)
    begin, end = mine.start * images_per_pass, min(mine.stop * images_per_pass, len(source))
    with_ensemble = len(networks) > 1
    # One place for each pass: other ranks add zeros to it, so the sum over passes has the same bits on any world.
    totals = torch.zeros(num_passes, len(networks) + with_ensemble, 4, dtype=torch.float64, device=device)
    modes = [network.training for network in networks]
    for network in networks:
        network.eval()
    batches = evaluation_batches(source, image_size, begin, end, images_per_pass, feeding or LoaderSettings())
    for number, (images, labels_array) in zip(mine, batches, strict=True):
        labels = send(torch.from_numpy(labels_array), device)
        batch = normalise(send(torch.from_numpy(images), device))
        probabilities = torch.zeros((), dtype=torch.float64, device=device)
        for row, network in enumerate(networks):
            with autocast_of(config, device):
                logits = network(batch)
            logits = logits.float()
            totals[number, row] = _counts(logits, F.cross_entropy(logits, labels, reduction="sum"), labels)
            if each is not None:
                best = logits.double().softmax(dim=1).max(dim=1)
                first = number * images_per_pass
                each[first : first + len(labels)] = torch.stack([best.indices.double(), best.values], dim=1)
            if with_ensemble:
                probabilities = probabilities + logits.double().softmax(dim=1)
        if with_ensemble:
            probabilities /= len(networks)
            totals[number, -1] = _counts(
                probabilities, F.nll_loss(probabilities.log(), labels, reduction="sum"), labels
            )
    for network, mode in zip(networks, modes, strict=True):
        network.train(mode)
    if size > 1:
        dist.all_reduce(totals)
        if each is not None:
            dist.all_reduce(each)
    by_network = totals.permute(1, 2, 0).tolist()
    return [_evaluation([math.fsum(column) for column in columns], len(source)) for columns in by_network]


def _counts(scores: Tensor, loss: Tensor, labels: Tensor) -> Tensor:
    """Top-1 hits, top-5 hits, the given loss and the number of images."""
    best = scores.topk(min(5, scores.shape[1]), dim=1).indices == labels[:, None]
    number = loss.new_full((), float(len(labels)))
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
    """Give the network the statistics of `num_ghosts` ghost batches from `start_samples` on; all ranks must call it."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    augmentation, size = Augmentation(**augment.model_dump()), config.train.ghost_batch_size
    tolerant = config.data.max_broken_share > 0  # the loader counts broken images when their turn comes

    def batches() -> Iterator[Tensor]:
        for index in shard_range(num_ghosts, world_size, rank):
            epochs, samples = sample_stream(seed, len(source), start_samples + index * size, size)
            images, _ = assemble_training(
                source, augmentation, config.data.image_size, seed, epochs, samples, tolerant=tolerant
            )
            yield normalise(torch.from_numpy(images))

    with autocast_of(config, next(network.parameters()).device):
        exact_statistics(network, batches(), config.norm.variance)


class Evaluator:
    """Evaluates the network that is being trained, once for the same weights; every rank must call its methods."""

    def __init__(self, components: Components, feeding: LoaderSettings) -> None:
        self.found: Evaluation | None = None  # of the weights as they are now
        self._is_published = False  # whether the network has the batch-norm statistics that belong to them
        self._components, self._feeding = components, feeding

    def weights_changed(self) -> None:
        """Forget what was found out about the weights before."""
        self.found, self._is_published = None, False

    def evaluate(self, phase: TrainingPhase, samples: int) -> Evaluation:
        """Exact accuracy of the weights as they are now, at `samples` of the phase."""
        if self.found is None:
            components = self._components
            self.publish(phase, samples)
            [self.found] = evaluate(
                [components.model],
                components.val_source,
                components.config,
                components.normalise,
                self._feeding,
            )
        return self.found

    def publish(self, phase: TrainingPhase, samples: int) -> None:
        """Give the model the batch-norm statistics it is to be evaluated and saved with.

        Averaged weights make other activations than those training saw: their statistics are always measured.
        """
        if self._is_published:
            return
        components = self._components
        components.statistics.publish()
        num_ghosts = components.config.norm.exact_batches
        if components.ema is not None:
            components.ema.copy_buffers()
            num_ghosts = num_ghosts or GHOSTS_FOR_STATISTICS
        if num_ghosts:
            measure_statistics(
                components.model,
                components.config,
                components.train_source,
                components.normalise,
                num_ghosts=num_ghosts,
                augment=phase.augment,
                seed=phase.seed,
                start_samples=samples,
            )
        self._is_published = True
