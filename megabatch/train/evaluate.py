"""Exact evaluation on any number of ranks: of the network in training, of a run folder, of a collapsed ensemble.

Ranks share the passes of `train.evaluation_batch_size` images. Nothing is padded or repeated, and the counts of all
passes are added up; the sum must be the size of the set. A pass is the same on any number of ranks, and so are its
bits.

Exact batch-norm statistics come from ghost batches of one place of the training stream. They are sharded over the ranks
as in training and averaged over all ghost batches: every rank gets the same, and their number does not matter.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
from megabatch.errors import CheckpointError
from megabatch.files import write_json
from megabatch.model.norm import exact_statistics
from megabatch.schedule.batch import shard_range
from megabatch.train.checkpoint import check_fits, decode, newest_whole, refusing_damage
from megabatch.train.components import Components, Normaliser, autocast_of, build_network, set_threads
from megabatch.train.ensemble import average_weights, member_paths, read_weights
from megabatch.train.feed import feeding_of, open_images
from megabatch.train.meeting import join
from megabatch.train.phases import TrainingPhase, branch_augment
from megabatch.train.run_dir import config_of_run
from megabatch.train.world import choose_device, read_world

_GHOSTS_FOR_STATISTICS = 32  # when the recipe itself does not say


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
    feeding: Feeding | None = None,
) -> list[Evaluation]:
    """Each network alone, and behind them, if there are several, the average of the probabilities they give.

    Every rank of the world must call it.
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
    batches = evaluation_batches(source, image_size, begin, end, images_per_pass, feeding or Feeding())
    for number, (images, labels_array) in zip(mine, batches, strict=True):
        labels = torch.from_numpy(labels_array).to(device)
        batch = normalise(torch.from_numpy(images))
        probabilities = torch.zeros((), dtype=torch.float64, device=device)
        for row, network in enumerate(networks):
            with autocast_of(config, device):
                logits = network(batch)
            logits = logits.float()
            totals[number, row] = _counts(logits, F.cross_entropy(logits, labels, reduction="sum"), labels)
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
    by_network = totals.permute(1, 2, 0).tolist()
    return [_evaluation([math.fsum(column) for column in columns], len(source)) for columns in by_network]


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
    """Give the network the statistics of `num_ghosts` ghost batches from `start_samples` on; all ranks must call it."""
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

    with autocast_of(config, next(network.parameters()).device):
        exact_statistics(network, batches(), config.norm.variance)


class Evaluator:
    """Evaluates the network that is being trained, once for the same weights; every rank must call its methods."""

    def __init__(self, components: Components, feeding: Feeding) -> None:
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
            num_ghosts = num_ghosts or _GHOSTS_FOR_STATISTICS
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


def evaluate_run(folder: Path, data: Path | None) -> dict[str, Any]:
    """Exact accuracy of `model.safetensors`, or of the newest checkpoint of a run that has not finished."""
    with _open(folder, data) as run:
        state, weights = _weights(folder)
        [found] = run.evaluate([run.network(state, f"'{folder / weights}'")])
    return {**_numbers(found), "num_images": found.num_images, "weights": weights, "is_main": run.is_main}


def evaluate_ensemble(folder: Path, data: Path | None) -> dict[str, Any]:
    """Each member alone, the average of their probabilities, and for comparison the average of their weights.

    Averaged weights make other activations than any member, so their batch-norm statistics are measured anew.
    On the run's own images the result stays in the run folder, as `ensemble.json`, for the report.
    """
    with _open(folder, data) as run:
        paths = member_paths(folder)
        if not paths:
            raise CheckpointError(
                f"run folder '{folder}' has no members; an ensemble needs a recipe with a [collapse] section, "
                "and at least one of its branches done"
            )
        states = [read_weights(path) for path in paths]
        networks = [run.network(state, f"'{path}'") for state, path in zip(states, paths, strict=True)]
        *alone, together = run.evaluate(networks) if len(networks) > 1 else 2 * run.evaluate(networks)
        averaged = run.network(average_weights(states), f"'{folder}'")
        num_ghosts = run.config.norm.exact_batches or _GHOSTS_FOR_STATISTICS
        measure_statistics(  # on training images as the members last saw them
            averaged,
            run.config,
            run.train_source,
            run.normalise,
            num_ghosts=num_ghosts,
            augment=branch_augment(run.config),
            seed=run.config.train.seed,
        )
        [of_average] = run.evaluate([averaged])
    members = [{"file": f"members/{path.name}", **_numbers(one)} for path, one in zip(paths, alone, strict=True)]
    found = {
        "members": members,
        "ensemble": _numbers(together),
        "weight_average": {**_numbers(of_average), "statistics_ghost_batches": num_ghosts},
        "num_images": together.num_images,
    }
    if run.is_main and data is None:  # accuracy on other images is not the run's own
        write_json(folder / "ensemble.json", found)
    return {**found, "is_main": run.is_main}


@dataclass
class _OpenRun:
    """A run folder with its images, in the world this process belongs to."""

    config: Config
    device: torch.device
    train_source: Source
    val_source: Source
    is_main: bool
    local_size: int  # ranks on this host, who share its cores

    def __post_init__(self) -> None:
        self.normalise = Normaliser(self.config, self.val_source.channels, self.device)

    def network(self, state: dict[str, Tensor], where: str) -> nn.Module:
        """The run's network with the given weights."""
        network = build_network(self.config, self.val_source, self.device)
        check_fits({"model": state}, network.state_dict(), where)
        network.load_state_dict(state)
        return network

    def evaluate(self, networks: Sequence[nn.Module]) -> list[Evaluation]:
        feeding = feeding_of(self.config, self.val_source, self.local_size)
        return evaluate(networks, self.val_source, self.config, self.normalise, feeding)


@contextmanager
def _open(folder: Path, data: Path | None) -> Iterator[_OpenRun]:
    config = config_of_run(folder)
    if data is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"path": str(data)})})
    world = read_world(os.environ, alone=True)
    set_threads(config, world.local_size if world else 1)
    device, backend = choose_device(config.comm.backend, world)
    with join(world, backend, config.comm.timeout_seconds) if world else nullcontext():
        train_source, val_source = open_images(config)
        is_main, local_size = (world.is_main, world.local_size) if world else (True, 1)
        yield _OpenRun(config, device, train_source, val_source, is_main, local_size)


def _numbers(found: Evaluation) -> dict[str, float]:
    numbers = asdict(found)
    del numbers["num_images"]
    return numbers


def _weights(folder: Path) -> tuple[dict[str, Any], str]:
    path = folder / "model.safetensors"
    # Without a summary the run has gone on since that model was written.
    if path.is_file() and (folder / "summary.json").is_file():
        return read_weights(path), path.name
    data = newest_whole(folder / "checkpoints", say=lambda line: None)
    if data is None:
        raise CheckpointError(f"run folder '{folder}' has neither a model nor a checkpoint yet; train it first")
    state = decode(data, str(folder))
    with refusing_damage(str(folder)):
        model = state["ema"]["model"] if state.get("ema") else state["model"]
        return dict(model), f"checkpoint of step {int(state['run']['clock']['steps'])}"
