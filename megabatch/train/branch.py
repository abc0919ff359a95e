"""A side branch in a loop of your own: train on, keep the result, and find the trunk as it was.

    with branch(model, optimizer, statistics):       # momentum starts anew
        ...                                          # the collapse: own rate, more decay, plain images
        statistics.publish()
        torch.save(model.state_dict(), "member-1.pt")
    ...                                              # weights, momentum and statistics are those of before the block

Codreanu 2017's collapsed ensemble is a trunk with such a block at the end of every cycle. The engine does the same with
checkpoints inside the branch, see `megabatch.train.session`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megabatch.model.norm import GhostStatistics

__all__ = ["branch", "copied"]


@contextmanager
def branch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    statistics: GhostStatistics | None = None,
    reset_momentum: bool = True,
) -> Iterator[None]:
    """Within the block the model may be trained on; afterwards it is as before, also when the block fails.

    With `statistics` every rank must enter and leave the block. Rates, decay and other settings of the optimizer's
    groups are put back too. The copy is held in the host's memory.
    """
    before = copied({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    of_norms = copied(statistics.state()) if statistics is not None else {}
    if reset_momentum:
        optimizer.state.clear()
    try:
        yield
    finally:
        model.load_state_dict(before["model"])
        optimizer.load_state_dict(before["optimizer"])
        if statistics is not None:
            statistics.load(of_norms)


def copied(value: Any) -> Any:
    """A state with its tensors copied to the host."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copied(one) for key, one in value.items()}
    if isinstance(value, list):
        return [copied(one) for one in value]
    return value
