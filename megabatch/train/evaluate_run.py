"""Evaluates the model of a run folder, alone or on all workers of a launcher."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors

from megabatch.errors import CheckpointError
from megabatch.train.build import Normaliser, autocast_of, build_network, open_pictures, set_threads
from megabatch.train.checkpoint import check_fits, decode, newest_whole
from megabatch.train.evaluate import evaluate
from megabatch.train.folder import config_of_run
from megabatch.train.world import choose_device, join, read_world

__all__ = ["evaluate_run"]


def evaluate_run(folder: Path, data: Path | None) -> dict[str, Any]:
    """Exact accuracy of `model.safetensors`, or of the newest checkpoint of a run that has not finished."""
    config = config_of_run(folder)
    if data is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"path": str(data)})})
    world = read_world(os.environ, alone=True)
    set_threads(config, world.local_size if world else 1)
    device, backend = choose_device(config.comm.backend, world)
    with join(world, backend, config.comm.timeout_seconds) if world else nullcontext():
        _, source = open_pictures(config)
        network = build_network(config, source, device)
        state, weights = _weights(folder)
        check_fits({"model": state}, network.state_dict(), f"'{folder / weights}'")
        network.load_state_dict(state)
        result = evaluate(
            network,
            source,
            config.data.image_size,
            Normaliser(config, source.channels, device),
            lambda: autocast_of(config, device),
            config.train.evaluation_batch,
            device,
        )
    return {
        "top1": result.top1,
        "top5": result.top5,
        "loss": result.loss,
        "num_pictures": result.num_pictures,
        "weights": weights,
        "speaks": world is None or world.is_first,
    }


def _weights(folder: Path) -> tuple[dict[str, Any], str]:
    path = folder / "model.safetensors"
    # Without a summary the run has gone on since that model was written.
    if path.is_file() and (folder / "summary.json").is_file():
        try:
            return load_safetensors(path.read_bytes()), path.name
        except SafetensorError as error:
            raise CheckpointError(
                f"'{path}' cannot be read ({error}); the file is damaged, remove it to use a checkpoint"
            ) from None
    data = newest_whole(folder / "checkpoints", say=lambda line: None)
    if data is None:
        raise CheckpointError(f"run folder '{folder}' has neither a model nor a checkpoint yet; train it first")
    state = decode(data, str(folder))
    return state["model"], f"checkpoint of update {state['run']['clock']['updates']}"
