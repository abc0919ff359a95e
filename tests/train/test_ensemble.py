"""Members: averaged weights; files named by number, listed in order, refused in one line when damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from megabatch.errors import CheckpointError
from megabatch.train.ensemble import (
    average_weights,
    member_file,
    member_paths,
    read_weights,
    weights_bytes,
    write_member,
)


def test_members_are_listed_in_the_order_in_which_they_were_made(tmp_path: Path) -> None:
    for member in (1, 2, 10):
        write_member(tmp_path, member_file(member), nn.Linear(2, 2))
    assert [path.stem for path in member_paths(tmp_path)] == ["member-1", "member-2", "member-10"]
    assert member_paths(tmp_path / "nowhere") == []


def test_weights_come_back_and_equal_numbers_make_equal_bytes(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    write_member(tmp_path, member_file(1), network)
    found = read_weights(member_paths(tmp_path)[0])
    assert found.keys() == network.state_dict().keys()
    assert all(torch.equal(value, found[name]) for name, value in network.state_dict().items())
    twin = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    twin.load_state_dict(found)
    assert weights_bytes(twin) == weights_bytes(network)


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "members" / "member-1.safetensors"
    write_member(tmp_path, member_file(1), nn.Linear(2, 2))
    path.write_bytes(path.read_bytes()[:20])
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
