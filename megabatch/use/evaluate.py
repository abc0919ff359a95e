"""Exact accuracy of a run folder's model, or of its collapsed ensemble, on any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megabatch.config import Config
from megabatch.data.formats import open_source
from megabatch.data.sources import Source, labelled_by_name, names_of
from megabatch.errors import CheckpointError, DataError
from megabatch.files import write_json
from megabatch.model.normaliser import normaliser_of
from megabatch.model.weights import average_weights, read_weights
from megabatch.report.run import CONFIG_FILE, ENSEMBLE_FILE, SUMMARY_FILE
from megabatch.train.card import WEIGHTS_FILE, read_card
from megabatch.train.checkpoint import check_fits, decode, newest_whole, refusing_damage
from megabatch.train.components import build_network, set_threads
from megabatch.train.evaluate import GHOSTS_FOR_STATISTICS, Evaluation, evaluate, measure_statistics
from megabatch.train.feed import feeding_of, open_images
from megabatch.train.phases import branch_augment
from megabatch.train.run_dir import config_of_run, member_paths
from megabatch.use.mistakes import write_mistakes
from megabatch.workers.meeting import join
from megabatch.workers.world import choose_device, read_world

_ADVICE = f"restore {CONFIG_FILE} and the weights of one and the same run"


def evaluate_run(folder: Path, data: Path | None) -> dict[str, Any] | None:
    """Exact accuracy of `model.safetensors`, or of the newest checkpoint of a run that has not finished.

    Every rank must call it; only the main rank gets an answer.
    Of a finished model on the run's own images, what went wrong class by class is written into the run folder.
    """
    with _open(folder, data) as run:
        state, weights = _weights(folder)
        each = torch.zeros(len(run.val_source), 2, dtype=torch.float64, device=run.device)
        [found] = run.evaluate([run.network(state, f"'{folder / weights}'")], each)
        if run.is_main and data is None and weights == WEIGHTS_FILE:
            predicted, confidence = each.cpu().numpy().T
            write_mistakes(folder, run.val_source, names_of(run.train_source), predicted.astype(np.int64), confidence)
    return asdict(found) | {"weights": weights} if run.is_main else None


def evaluate_ensemble(folder: Path, data: Path | None) -> dict[str, Any] | None:
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
        num_ghosts = run.config.norm.exact_batches or GHOSTS_FOR_STATISTICS
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
    if not run.is_main:
        return None
    if data is None:  # accuracy on other images is not the run's own
        write_json(folder / ENSEMBLE_FILE, found)
    return found


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
        self.normalise = normaliser_of(self.config, self.val_source.channels, self.device)

    def network(self, state: dict[str, Tensor], where: str) -> nn.Module:
        """The run's network with the given weights."""
        network = build_network(self.config, self.val_source.num_classes, self.val_source.channels, self.device)
        check_fits({"model": state}, network.state_dict(), where, _ADVICE)
        network.load_state_dict(state)
        return network

    def evaluate(self, networks: Sequence[nn.Module], each: Tensor | None = None) -> list[Evaluation]:
        feeding = feeding_of(self.config, self.val_source, self.local_size)
        return evaluate(networks, self.val_source, self.config, self.normalise, feeding, each)


@contextmanager
def _open(folder: Path, data: Path | None) -> Iterator[_OpenRun]:
    own = config = config_of_run(folder)
    if data is not None:
        # The folders of a class say what it is: there may be fewer of them than the model knows.
        changed = {"path": str(data)} | ({"num_classes": None} if config.data.source == "folder" else {})
        config = config.model_copy(update={"data": config.data.model_copy(update=changed)})
    world = read_world(os.environ, alone=True)
    set_threads(config, world.local_size if world else 1)
    device, backend = choose_device(config.comm.backend, world)
    with join(world, backend, config.comm.timeout_seconds, device) if world else nullcontext():
        train_source, val_source = open_images(config, to_train=False)
        if data is not None and val_source.class_names and (known := _known_classes(folder, own)):
            val_source = labelled_by_name(val_source, known)
        is_main, local_size = (world.is_main, world.local_size) if world else (True, 1)
        yield _OpenRun(config, device, train_source, val_source, is_main, local_size)


def _known_classes(folder: Path, own: Config) -> tuple[str, ...]:
    """The names of the model's classes: from its card, before there is one from the run's own images."""
    with suppress(CheckpointError):
        return read_card(folder).class_names
    with suppress(DataError):
        return open_source(own.data.source, own.data.path or None, "train", memory_limit_bytes=0).class_names
    return ()


def _numbers(found: Evaluation) -> dict[str, float]:
    numbers = asdict(found)
    del numbers["num_images"]
    return numbers


def _weights(folder: Path) -> tuple[dict[str, Any], str]:
    path = folder / WEIGHTS_FILE
    # Without a summary the run has gone on since that model was written.
    if path.is_file() and (folder / SUMMARY_FILE).is_file():
        return read_weights(path), path.name
    data = newest_whole(folder / "checkpoints", say=lambda line: None)
    if data is None:
        raise CheckpointError(f"run folder '{folder}' has neither a model nor a checkpoint yet; train it first")
    state = decode(data, str(folder))
    with refusing_damage(str(folder)):
        model = state["ema"]["model"] if state.get("ema") else state["model"]
        return dict(model), f"checkpoint of step {int(state['run']['clock']['steps'])}"
