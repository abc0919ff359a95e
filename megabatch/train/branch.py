"""A side branch: train on, save the result, and find the trunk as it was.

    with branch(model, optimizer, statistics):       # momentum starts anew
        ...                                          # the collapse: own lr, more decay, plain images
        statistics.publish()
        torch.save(model.state_dict(), "member-1.pt")
    ...                                              # weights, momentum and statistics are those of before the block

Codreanu 2017's collapsed ensemble is a trunk with such a block at the end of every cycle. `megabatch train` makes its
members in such blocks. The block's value is the trunk's state: a checkpoint written inside a branch holds it, and a
resumed run gives it back as `trunk`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from megabatch.comm.exact import ExactSums
from megabatch.model.average import WeightAverage
from megabatch.model.norm import GhostStatistics
from megabatch.optim.groups import clear_state

__all__ = ["TrainingState", "branch", "load_training_state", "training_state"]

TrainingState = dict[str, Any]


@contextmanager
def branch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    statistics: GhostStatistics | None = None,
    scaler: torch.amp.GradScaler | None = None,
    exact: ExactSums | None = None,
    ema: WeightAverage | None = None,
    *,
    reset_momentum: bool = True,
    trunk: TrainingState | None = None,
) -> Iterator[TrainingState]:
    """Within the block the model may be trained on; afterwards it is as before, also when the block fails.

    Values of the optimizer's groups are put back too. The copy is held in the host's memory. trunk: the state to
    return to when the branch has begun already, in a run that is resumed; nothing is reset then.
    """
    if trunk is None:
        trunk = copied(training_state(model, optimizer, statistics, scaler, exact, ema))
        if reset_momentum:
            clear_state(optimizer)
    try:
        yield trunk
    except BaseException:
        with suppress(Exception):  # a device that fails must not hide the error behind one of its own
            load_training_state(trunk, model, optimizer, statistics, scaler, exact, ema)
        raise
    load_training_state(trunk, model, optimizer, statistics, scaler, exact, ema)


def training_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    statistics: GhostStatistics | None = None,
    scaler: torch.amp.GradScaler | None = None,
    exact: ExactSums | None = None,
    ema: WeightAverage | None = None,
) -> TrainingState:
    """What training changes, the same on every rank. Tensors are the live ones."""
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "statistics": statistics.state_dict() if statistics is not None else {},
        "scaler": scaler.state_dict() if scaler is not None else {},
        "exact": exact.state_dict() if exact is not None else {},
        "ema": ema.state_dict() if ema is not None else {},
    }


def load_training_state(
    state: TrainingState,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    statistics: GhostStatistics | None = None,
    scaler: torch.amp.GradScaler | None = None,
    exact: ExactSums | None = None,
    ema: WeightAverage | None = None,
) -> None:
    """Return to `state`."""
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if statistics is not None:
        statistics.load_state_dict(state["statistics"])
    if scaler is not None and scaler.is_enabled():
        scaler.load_state_dict(state["scaler"])
    if exact is not None and state["exact"]:  # empty where sums were in floats until now
        exact.load_state_dict(state["exact"])
    if ema is not None and state.get("ema"):  # likewise where weights were not averaged until now
        ema.load_state_dict(state["ema"])


def copied(value: Any) -> Any:
    """A state with its tensors copied to the host."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copied(one) for key, one in value.items()}
    if isinstance(value, list):
        return [copied(one) for one in value]
    return value
