"""What a pass computes, against torch's own functions."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from megabatch.comm.shape import near_square
from megabatch.data.loader import Ghost, Mixed
from megabatch.train.components import build_components
from megabatch.train.metrics import Stopwatch
from megabatch.workers.world import World
from tests.ranks import run_ranks
from tests.train.test_step import GHOST, config_of, control_of, images_and_labels, train_step


def loss_of_mixed_images(rank: int, world_size: int) -> tuple[float, float]:
    """What the step says, and torch's own cross-entropy with probabilities instead of labels."""
    images, labels = images_and_labels()
    config = config_of(("train.global_batch_size=8", "train.label_smoothing=0.1"))
    world = World(rank, world_size, rank, world_size, "torchrun", "127.0.0.1", 0)
    components = build_components(config, world, near_square(1), torch.device("cpu"))
    network = copy.deepcopy(components.network).train()
    mixed = Mixed(labels[100 : 100 + GHOST], torch.linspace(0.5, 1.0, GHOST))
    step = next(iter(control_of(config)))
    ghost = Ghost(images[:GHOST], labels[:GHOST], 0, mixed=mixed)
    result = train_step(components, step, [ghost], 0, Stopwatch(host_clock_tells=True))
    assert result is not None
    own, other = (F.one_hot(of, 10).float() for of in (labels[:GHOST], mixed.labels))
    soft = mixed.shares[:, None] * own + (1 - mixed.shares[:, None]) * other
    logits = network(components.normalise(images[:GHOST]))
    return result.loss, float(F.cross_entropy(logits, soft, label_smoothing=0.1))


def test_the_loss_of_mixed_images_is_that_of_soft_labels() -> None:
    found, expected = run_ranks(1, loss_of_mixed_images, 1)[0]
    assert found == pytest.approx(expected, rel=1e-5)
