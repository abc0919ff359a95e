"""Images become what torchvision's transforms make of them, in the layout that was asked for."""

from __future__ import annotations

import pytest
import torch

from megabatch.errors import ConfigError
from megabatch.model.normaliser import Normaliser, normaliser_of
from tests.system.runs import small_config


@pytest.mark.parametrize("channels_last", [False, True])
def test_images_are_normalised_by_channel(channels_last: bool) -> None:
    images = torch.arange(2 * 4 * 5 * 3, dtype=torch.uint8).reshape(2, 4, 5, 3)
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.4, 0.5, 0.6])
    found = Normaliser(mean.tolist(), std.tolist(), channels_last=channels_last)(images)
    assert torch.allclose(found, ((images / 255 - mean) / std).permute(0, 3, 1, 2), atol=1e-6)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    assert found.is_contiguous(memory_format=memory_format)


def test_what_was_given_stays_as_it_was() -> None:
    images = torch.ones(1, 2, 2, 1)
    Normaliser([0.5], [0.5], channels_last=True)(images)
    assert torch.equal(images, torch.ones(1, 2, 2, 1))


def test_means_must_fit_the_channels_of_the_images() -> None:
    with pytest.raises(ConfigError, match=r"data\.mean has 2 values but images have 3 channels"):
        normaliser_of(small_config("data.mean=[0.5, 0.5]", "data.std=[0.5, 0.5]"), 3, torch.device("cpu"))
