"""Exact statistics over ghost batches of the training stream, the same on any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor, nn

from megabatch.config import Config
from megabatch.data.augment import Augmentation
from megabatch.data.batches import assemble_training
from megabatch.data.randomness import stream
from megabatch.data.sources import ImageArray, Source
from megabatch.errors import DataError
from megabatch.train.phases import branch_augment
from megabatch.train.statistics import measure_statistics
from tests.ranks import run_ranks
from tests.system.runs import small_config

SETTINGS = ("norm.variance=pooled", "data.image_size=8")
START = 13


def images() -> ImageArray:
    numbers = np.random.default_rng(1)
    return ImageArray("test", numbers.integers(0, 256, (31, 8, 8, 1), dtype=np.uint8), numbers.integers(0, 3, 31), 3)


def normalise(batch: Tensor) -> Tensor:
    return batch.permute(0, 3, 1, 2).double() / 255.0


def measure(network: nn.Module, config: Config, source: Source) -> None:
    options = {"num_ghosts": 5, "seed": 3, "start_samples": START}
    measure_statistics(network, config, source, normalise, augment=branch_augment(config), **options)


def on_rank(rank: int) -> list[float]:
    network = nn.BatchNorm2d(1).double()
    measure(network, small_config(*SETTINGS), images())
    assert network.running_mean is not None
    assert network.running_var is not None
    return [float(network.running_mean), float(network.running_var)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_statistics_are_those_of_the_ghosts_that_follow_in_the_stream(world_size: int) -> None:
    config = small_config(*SETTINGS)
    epochs, samples = stream(3, 31, START, 40)  # five ghosts of eight: more than an epoch
    augmentation = Augmentation(**branch_augment(config).model_dump())
    pixels, _ = assemble_training(images(), augmentation, 8, 3, epochs, samples)
    ghosts = pixels.reshape(5, -1) / 255.0
    means, variances = ghosts.mean(axis=1), ghosts.var(axis=1, ddof=1)
    for found in run_ranks(world_size, on_rank):
        assert found == pytest.approx([means.mean(), variances.mean() + means.var()], rel=1e-9)


class WithHoles:
    """Images of which one in five cannot be read."""

    def __init__(self) -> None:
        whole = images()
        self.name, self.num_classes, self.channels, self.labels = "holes", 3, 1, whole.labels
        self._images = whole.images

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> NDArray[np.uint8]:
        if index % 5 == 0:
            raise DataError(f"image {index} is broken")
        image: NDArray[np.uint8] = self._images[index]
        return image


def test_broken_images_are_replaced_as_in_training_unless_none_are_allowed() -> None:
    network = nn.BatchNorm2d(1).double()
    measure(network, small_config(*SETTINGS), WithHoles())
    strict = small_config(*SETTINGS, "data.max_broken_share=0")
    with pytest.raises(DataError, match="is broken"):
        measure(network, strict, WithHoles())
