"""Averaged weights with statistics of their own, the same on any number of workers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megabatch.data.augment import Augmentation
from megabatch.data.batches import assemble_training
from megabatch.data.randomness import stream
from megabatch.data.sources import ImageArray
from megabatch.errors import DataError
from megabatch.train.ensemble import average_weights, re_estimate_statistics
from megabatch.train.segment import branch_augment
from tests.ranks import run_ranks
from tests.system.runs import small_config

SETTINGS = ("norm.exact_batches=5", "norm.variance=pooled", "train.seed=3", "data.image_size=8")


def test_floats_are_averaged_and_counters_are_the_newest() -> None:
    states = [
        {
            "weight": torch.full((2, 2), value),
            "half": torch.tensor([value], dtype=torch.float16),
            "count": torch.tensor(k),
        }
        for k, value in enumerate((1.0, 2.0, 6.0))
    ]
    averaged = average_weights(states)
    assert torch.equal(averaged["weight"], torch.full((2, 2), 3.0))
    assert averaged["half"].dtype == torch.float16
    assert averaged["half"].item() == 3.0
    assert int(averaged["count"]) == 2
    assert averaged["weight"].data_ptr() != states[-1]["weight"].data_ptr()


def images() -> ImageArray:
    numbers = np.random.default_rng(1)
    return ImageArray("test", numbers.integers(0, 256, (31, 8, 8, 1), dtype=np.uint8), numbers.integers(0, 3, 31), 3)


def normalise(batch: Tensor) -> Tensor:
    return batch.permute(0, 3, 1, 2).double() / 255.0


def re_estimate(rank: int) -> tuple[int, list[float]]:
    network = nn.BatchNorm2d(1).double()

    def autocast() -> torch.autocast:
        return torch.autocast("cpu", enabled=False)

    count = re_estimate_statistics(network, small_config(*SETTINGS), images(), normalise, autocast)
    assert network.running_mean is not None
    assert network.running_var is not None
    return count, [float(network.running_mean), float(network.running_var)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_statistics_are_those_of_the_first_ghosts_of_the_stream(world_size: int) -> None:
    config = small_config(*SETTINGS)
    epochs, samples = stream(3, 31, 0, 40)  # five ghosts of eight: more than an epoch
    augmentation = Augmentation(**branch_augment(config).model_dump())
    pixels, _ = assemble_training(images(), augmentation, 8, 3, epochs, samples)
    ghosts = pixels.reshape(5, -1) / 255.0
    means, variances = ghosts.mean(axis=1), ghosts.var(axis=1, ddof=1)
    for count, found in run_ranks(world_size, re_estimate):
        assert count == 5
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
    def autocast() -> torch.autocast:
        return torch.autocast("cpu", enabled=False)

    network = nn.BatchNorm2d(1).double()
    assert re_estimate_statistics(network, small_config(*SETTINGS), WithHoles(), normalise, autocast) == 5
    strict = small_config(*SETTINGS, "data.max_broken_share=0")
    with pytest.raises(DataError, match="is broken"):
        re_estimate_statistics(network, strict, WithHoles(), normalise, autocast)
