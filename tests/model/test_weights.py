"""Weights come back from their files, damaged ones are refused in one line; several are averaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from megabatch.errors import CheckpointError
from megabatch.model.weights import average_weights, read_weights, weights_bytes


def test_weights_come_back_and_equal_numbers_make_equal_bytes(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    (tmp_path / "w.safetensors").write_bytes(weights_bytes(network))
    found = read_weights(tmp_path / "w.safetensors")
    assert found.keys() == network.state_dict().keys()
    assert all(torch.equal(value, found[name]) for name, value in network.state_dict().items())
    twin = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    twin.load_state_dict(found)
    assert weights_bytes(twin) == weights_bytes(network)


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(weights_bytes(nn.Linear(2, 2))[:20])
    with pytest.raises(CheckpointError, match="damaged") as caught:
        read_weights(path)
    assert "\n" not in str(caught.value)


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
