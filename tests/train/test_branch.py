"""A branch in a stranger's loop leaves the trunk as it was: weights, momentum, rates and statistics."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import megabatch
from megabatch.errors import CommunicationError
from megabatch.train.branch import Trained, branch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Trunk:
    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)).double()
        self.statistics = megabatch.GhostStatistics(self.model, momentum=0.3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.numbers = torch.Generator().manual_seed(2)

    def step(self, count: int = 1) -> list[float]:
        losses = []
        for _ in range(count):
            inputs = torch.randn(8, 4, generator=self.numbers, dtype=torch.float64)
            self.optimizer.zero_grad()
            with self.statistics.ghost():
                outputs = self.model(inputs)
            loss: Tensor = (outputs - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.statistics.after_step()
            losses.append(loss.item())
        return losses


def states(trunk: Trunk) -> list[Tensor]:
    trunk.statistics.publish()
    momenta = [trunk.optimizer.state[p]["momentum_buffer"] for p in trunk.model.parameters()]
    return [value.clone() for value in [*trunk.model.state_dict().values(), *momenta]]


def test_the_trunk_goes_on_as_if_there_had_been_no_branch() -> None:
    plain, branched = Trunk(), Trunk()
    assert plain.step(3) == branched.step(3)
    numbers = branched.numbers.get_state()
    with branch(branched.model, branched.optimizer, branched.statistics):
        assert not branched.optimizer.state  # momentum starts anew
        branched.optimizer.param_groups[0]["lr"] = 0.01
        branched.step(4)
    branched.numbers.set_state(numbers)
    assert branched.optimizer.param_groups[0]["lr"] == 0.1
    assert plain.step(3) == branched.step(3)
    assert all(torch.equal(a, b) for a, b in zip(states(plain), states(branched), strict=True))


def test_momentum_may_be_kept_and_a_failing_branch_is_undone() -> None:
    trunk = Trunk()
    trunk.step(2)
    before = states(trunk)
    with pytest.raises(ZeroDivisionError):
        _fail_in_a_branch(trunk, ZeroDivisionError())
    assert all(torch.equal(a, b) for a, b in zip(before, states(trunk), strict=True))


@pytest.mark.parametrize(
    ("error", "on_device", "is_undone"),
    [(CommunicationError("gone"), True, False), (CommunicationError("gone"), False, True), (KeyError(), True, True)],
)
def test_the_weights_of_a_device_that_failed_are_left_alone(
    error: Exception, on_device: bool, is_undone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy to it would wait for the collective that never ends."""
    monkeypatch.setattr(Trained, "_is_on_device", property(lambda _: on_device))
    trunk = Trunk()
    trunk.step()
    before = states(trunk)
    with pytest.raises(type(error)):
        _fail_in_a_branch(trunk, error)
    assert all(a.equal(b) for a, b in zip(before, states(trunk), strict=True)) == is_undone


def _fail_in_a_branch(trunk: Trunk, error: Exception) -> None:
    with branch(trunk.model, trunk.optimizer, trunk.statistics, reset_momentum=False):
        assert trunk.optimizer.state
        trunk.step(2)
        raise error


def test_exact_sums_return_to_the_shifts_of_the_trunk() -> None:
    """Gradients of a branch are smaller; what the trunk sums next has the bits of a run without the branch."""
    parameter = torch.zeros(3, requires_grad=True)
    model, exact = nn.ParameterList([parameter]), megabatch.ExactSums().bind([parameter])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(value: float) -> None:
        for _ in exact.attempts(1):
            parameter.grad = torch.full((3,), value)
            exact.add_ghost()

    step(1.0)
    before = exact.state_dict()
    with branch(model, optimizer, exact=exact):
        for value in (100.0, *[0.01] * 40):
            step(value)
        assert exact.state_dict() != before
    assert exact.state_dict() == before
