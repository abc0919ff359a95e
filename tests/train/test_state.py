"""The state of a run goes into plain values and back, and says which of two workers is further."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from megabatch.schedule.clock import Clock
from megabatch.train.evaluate import Evaluation
from megabatch.train.phases import Ending
from megabatch.train.state import MadeStep, Member, RunEnd, RunState

CLOCK = Clock(samples_per_epoch=50, total_samples=200)


def made_after(state: RunState, *, applied: bool = True, stop_wanted: bool = False) -> MadeStep:
    return MadeStep(state.clock, {"lr": 0.1}, {"train_loss": 2.0}, applied, 0.5, is_last=False, stop_wanted=stop_wanted)


def a_state() -> RunState:
    """Inside the second branch, after a step that was left out and is still to be finished."""
    state = RunState(CLOCK)
    state.count_step(made_after(state), 16)
    state.finish_step()
    state.enter_phase(2)
    state.leave_trunk(CLOCK, {"weights": torch.ones(2)})
    state.return_to_trunk(Member(1, 0.0, 1.0, 0.5, 0.9, 1.0, "members/1.safetensors"))
    state.leave_trunk(CLOCK, {"weights": torch.zeros(2)})
    state.count_step(made_after(state, applied=False, stop_wanted=True), 16)
    return state


def through_json(state: RunState) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(json.dumps(state.state_dict()))
    return table


def test_what_a_checkpoint_holds_comes_back_and_the_place_is_between_two_steps() -> None:
    state = a_state()
    other = RunState(Clock(samples_per_epoch=1, total_samples=1))
    other.load_state_dict(through_json(state), state.trunk)
    assert other.state_dict() == state.state_dict()
    assert other.clock == state.clock
    assert other.trunk is state.trunk
    assert (other.skipped_steps, other.members[0].file) == (1, "members/1.safetensors")
    assert (other.made, other.stop_wanted, other.outcome) == (None, False, None)


@pytest.mark.parametrize("result", [None, Evaluation(0.5, 0.9, 1.0, 100)])
def test_another_worker_goes_on_at_the_very_place(result: Evaluation | None) -> None:
    state = a_state()
    if result is not None:
        state.end(RunEnd(Ending.OVER, result))
    other = RunState(CLOCK)
    other.load_state_dict(through_json(state), state.trunk, json.loads(json.dumps(state.place_dict())))
    assert other == state
    assert other.how_far == state.how_far


@pytest.mark.parametrize("missing", ["clock", "phase", "members", "skipped_steps"])
def test_a_missing_part_is_an_error_and_a_part_too_many_is_left_alone(missing: str) -> None:
    table = through_json(a_state())
    RunState(CLOCK).load_state_dict({**table, "load_state_dict": "of a stranger"})
    del table[missing]
    with pytest.raises(KeyError, match=missing):
        RunState(CLOCK).load_state_dict(table)


def test_who_has_done_more_is_further() -> None:
    """A step that is made counts more than none, a finished one more than a made one, the end more than anything."""
    state = RunState(CLOCK)
    places = [state.how_far]
    for _ in range(2):
        state.count_step(made_after(state), 16)
        places.append(state.how_far)
        state.finish_step()
        places.append(state.how_far)
    state.leave_trunk(state.clock, {})
    state.return_to_trunk(Member(1, 0.0, 1.0, 0.5, 0.9, 1.0, ""))
    places.append(state.how_far)
    state.end(RunEnd(Ending.OVER, None))
    places.append(state.how_far)
    assert places == sorted(set(places))
