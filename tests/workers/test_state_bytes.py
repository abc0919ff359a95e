"""A training state travels whole, and nothing else is taken for one."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from megabatch.errors import CommunicationError
from megabatch.workers.state_bytes import pack, unpack


def test_a_state_comes_back_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "none": None,
        "list": [1, 2.5, "x", True],
    }
    found = unpack(pack(state))
    assert found["list"] == state["list"]
    assert found["none"] is None
    for name, value in model.state_dict().items():
        assert torch.equal(found["model"][name], value)
        assert found["model"][name].stride() == value.stride()
    twin = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.1)
    twin.load_state_dict(found["optimizer"])
    assert twin.param_groups[0]["lr"] == 0.1
    for key, value in optimizer.state_dict()["state"].items():
        found_buffer = twin.state_dict()["state"][key]["momentum_buffer"]
        assert torch.equal(found_buffer, value["momentum_buffer"])
        assert found_buffer.stride() == value["momentum_buffer"].stride()


def test_odd_layouts_come_back() -> None:
    """A part of a larger tensor, one that repeats itself, an empty one, a number: as they are cloned."""
    whole = torch.arange(24.0).reshape(2, 3, 4)
    for one in (whole[:, :, ::2], whole[:1].expand(5, 3, 4), whole[:0], whole.sum(), whole.permute(2, 0, 1)):
        found = unpack(pack({"a": one}))["a"]
        assert torch.equal(found, one)
        assert found.stride() == one.clone().stride()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 100,
        pickle.dumps({"a": 1}),
        pack({"a": torch.ones(3)})[:-1],
        pack({"a": torch.ones(3)}).replace(b"pairs", b"paths"),
        pack({"a": torch.ones(3)}).replace(rb'"strides\": [1]', rb'"strides\": [9]'),
    ],
)
def test_anything_else_is_refused(content: bytes) -> None:
    with pytest.raises(CommunicationError, match="another worker sent"):
        unpack(content)


def test_only_plain_values_are_sent() -> None:
    with pytest.raises(TypeError, match="holds a set"):
        pack({"a": {1, 2}})
