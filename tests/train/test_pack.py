"""A training state travels whole, and nothing else is taken for one."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from megabatch.errors import CommunicationError
from megabatch.train.pack import pack, unpack


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
    twin = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.1)
    twin.load_state_dict(found["optimizer"])
    assert twin.param_groups[0]["lr"] == 0.1
    for key, value in optimizer.state_dict()["state"].items():
        assert torch.equal(twin.state_dict()["state"][key]["momentum_buffer"], value["momentum_buffer"])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 100,
        pickle.dumps({"a": 1}),
        pack({"a": torch.ones(3)})[:-1],
        pack({"a": torch.ones(3)}).replace(b"pairs", b"paths"),
    ],
)
def test_anything_else_is_refused(content: bytes) -> None:
    with pytest.raises(CommunicationError, match="another worker sent"):
        unpack(content)


def test_only_plain_values_are_sent() -> None:
    with pytest.raises(TypeError, match="holds a set"):
        pack({"a": {1, 2}})
