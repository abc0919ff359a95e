"""An elastic run on one worker: what it does when it loses contact; tests/system has whole runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megabatch.errors import CommunicationError, DisagreementError, LaunchError
from megabatch.train.elastic import ElasticRun
from megabatch.train.request import Elastic


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker among three that always meets the same others."""
    made: Any = ElasticRun(Elastic(), b"0123456789abcdef")
    made._names = ("a", "b", "c")
    made._trainer = SimpleNamespace(state=SimpleNamespace(how_far=7, clock=SimpleNamespace(steps=3)))
    monkeypatch.setattr(made, "_leave_world", lambda: None)
    monkeypatch.setattr(made, "_move", lambda roster: None)
    return made


def test_the_same_failure_again_and_again_ends_with_a_message(run: Any) -> None:
    tries = []

    def fail() -> None:
        tries.append(1)
        raise CommunicationError("no answer")

    with pytest.raises(LaunchError, match=r"3 workers met after step 3, and 8 times .*no answer.* a, b, c") as caught:
        run.together(fail)
    assert len(tries) == 8
    assert "\n" not in str(caught.value)


def test_failures_between_which_the_run_goes_on_do_not_add_up(run: Any) -> None:
    tries = []

    def fail_now_and_then() -> str:
        tries.append(1)
        run._trainer.state.how_far += len(tries) % 3 == 0
        if len(tries) == 20:
            return "done"
        raise CommunicationError("no answer")

    assert run.together(fail_now_and_then) == "done"


def test_workers_that_disagree_are_not_tried_again(run: Any) -> None:
    tries = []

    def disagree() -> None:
        tries.append(1)
        raise DisagreementError("bucket 0: workers disagree about 100 int32")

    with pytest.raises(LaunchError, match="workers disagree about 100 int32"):
        run.together(disagree)
    assert len(tries) == 1
