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
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from megabatch.comm.exact import ExactSums
from megabatch.comm.failures import is_lost_contact
from megabatch.model.average import WeightAverage
from megabatch.model.norm import GhostStatistics
from megabatch.optim.groups import clear_state

__all__ = ["Trained", "TrainingState", "branch"]

TrainingState = dict[str, Any]


@dataclass(frozen=True)
class Trained:
    """What training changes, the same on every rank."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    statistics: GhostStatistics | None = None
    scaler: torch.amp.GradScaler | None = None
    exact: ExactSums | None = None
    ema: WeightAverage | None = None

    def state_dict(self) -> TrainingState:
        """Everything, by its name here. Tensors are the live ones."""
        parts = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: part.state_dict() if part is not None else {} for name, part in parts.items()}

    def load_state_dict(self, state: TrainingState) -> None:
        """Return to `state`."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.statistics is not None:
            self.statistics.load_state_dict(state["statistics"])
        if self.scaler is not None and self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        if self.exact is not None and state["exact"]:  # empty where sums were in floats until now
            self.exact.load_state_dict(state["exact"])
        if self.ema is not None and state.get("ema"):  # likewise where weights were not averaged until now
            self.ema.load_state_dict(state["ema"])

    @property
    def _is_on_device(self) -> bool:
        return any(parameter.device.type != "cpu" for parameter in self.model.parameters())

    @contextmanager
    def branch(self, *, reset_momentum: bool = True, trunk: TrainingState | None = None) -> Iterator[TrainingState]:
        """See `megabatch.branch`."""
        if trunk is None:
            trunk = copied(self.state_dict())
            if reset_momentum:
                clear_state(self.optimizer)
        try:
            yield trunk
        except BaseException as error:
            if not (is_lost_contact(error) and self._is_on_device):  # there a copy would wait for what never ends
                with suppress(Exception):  # a device that fails must not hide the error behind one of its own
                    self.load_state_dict(trunk)
            raise
        self.load_state_dict(trunk)


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
) -> AbstractContextManager[TrainingState]:
    """Within the block the model may be trained on; afterwards it is as before, also when the block fails.

    Values of the optimizer's groups are put back too. The copy is held in the host's memory. trunk: the state to
    return to when the branch has begun already, in a run that is resumed; nothing is reset then.
    """
    trained = Trained(model, optimizer, statistics, scaler, exact, ema)
    return trained.branch(reset_momentum=reset_momentum, trunk=trunk)


def copied(value: Any) -> Any:
    """A state with its tensors copied to the host."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copied(one) for key, one in value.items()}
    if isinstance(value, list):
        return [copied(one) for one in value]
    return value
