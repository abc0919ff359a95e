"""An elastic run on one worker: what it does when it loses contact; tests/system has whole runs."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch.distributed as dist

from megabatch.errors import CommunicationError, DisagreementError, LaunchError
from megabatch.train import elastic, elastic_entry
from megabatch.train.elastic import ElasticRun, LeftRunError
from megabatch.train.request import Elastic, TrainRequest
from megabatch.train.step import StepTotals
from megabatch.workers.local import REPLACES_VARIABLE
from megabatch.workers.membership import Membership, OtherRunError, TooFewWorkersError
from tests.ranks import run_ranks
from tests.system.runs import clean_environment, small_config

Collective = Callable[..., Any]


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


def begun(rank: int, replacing: int, folder: str) -> str:
    os.environ.update({REPLACES_VARIABLE: "1"} if rank == replacing else {})
    vars(elastic).update(Membership=MagicMock(), agreement_of=MagicMock(), agreement_text=str)
    made: Any = ElasticRun(Elastic(), b"0123456789abcdef")
    made._move = lambda roster: SimpleNamespace(is_beginning=True)
    trainer: Any = SimpleNamespace(components=SimpleNamespace(config=small_config()), folder=Path(folder))
    with ExitStack() as stack:
        return str(made.begin(trainer, stack, resume=False).value)


def test_one_that_comes_first_among_replacements_does_not_begin_the_run_anew(tmp_path: Path) -> None:
    """All workers had died. A second command's worker may meet those in their place as the main rank."""
    (tmp_path / "config.toml").touch()
    assert run_ranks(2, begun, 1, str(tmp_path)) == ["resumed", "resumed"]
    assert run_ranks(2, begun, 2, str(tmp_path)) == ["new", "new"]


@pytest.mark.parametrize("asked_to_go", [True, False])
def test_too_few_workers_are_no_failure_of_one_that_was_asked_to_go(run: Any, asked_to_go: bool) -> None:
    """Its exit code says that it left; either way a checkpoint is written."""
    saved: list[Any] = []

    def ask(progress: int) -> None:
        raise TooFewWorkersError("fewer than 2 workers")

    run._membership, run._stack = SimpleNamespace(ask=ask), ExitStack()
    run._trainer.writer = SimpleNamespace(save_last=saved.append)
    run._trainer.stop = SimpleNamespace(wanted=asked_to_go)
    with pytest.raises(LeftRunError if asked_to_go else TooFewWorkersError):
        run._ask()
    assert saved == [run._stack]


@pytest.mark.parametrize("replaces", [True, False])
def test_a_replacement_with_other_code_does_not_end_the_run(
    run: Any, replaces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error would make the launcher end the others; what the user has typed is another matter."""

    def ask(progress: int) -> None:
        raise OtherRunError("code is 'a' here and 'b' there")

    run._membership = SimpleNamespace(ask=ask)
    monkeypatch.setenv(REPLACES_VARIABLE, "1")
    if not replaces:
        monkeypatch.delenv(REPLACES_VARIABLE)
    with pytest.raises(LeftRunError if replaces else OtherRunError, match="code is 'a' here"):
        run._ask()


STEPS = 6
SETTINGS = (f"train.max_steps={STEPS}", "train.threads_per_worker=1", "comm.wait_seconds=100", "log.to=[]")


def at_the_end(fault: Callable[[Collective, Any], Any]) -> None:
    """Let `fault` happen in the one worker of all that is the first to add up an evaluation after the last step."""
    real, evaluations = dist.all_reduce, []

    def all_reduce(tensor: Any, *args: Any, **options: Any) -> Any:
        if tensor.dim() == 3:  # passes x networks x counts: only an evaluation has three
            evaluations.append(1)
            if len(evaluations) == 1 and _is_the_first("fault"):
                return fault(real, tensor)
        return real(tensor, *args, **options)

    dist.all_reduce = all_reduce


def _is_the_first(what: str) -> bool:
    try:
        os.close(os.open(Path(os.environ["TEST_MARKS"]) / what, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def lose_contact_behind_the_sum(real: Collective, tensor: Any) -> None:
    real(tensor)  # the others have the result, and go on to conclude
    raise RuntimeError("[/test/gloo/transport/tcp/pair.cc:1] Connection closed by peer")


def die_behind_the_sum(real: Collective, tensor: Any) -> None:
    real(tensor)
    os.kill(os.getpid(), signal.SIGKILL)


def die_and_come_again(request: TrainRequest) -> int:
    """The others conclude, and lose contact there when the one that takes its place has come."""
    came = Path(os.environ["TEST_MARKS"]) / "came"
    if REPLACES_VARIABLE in os.environ:
        make = Membership.__init__

        def init(self: Membership, *args: Any, **options: Any) -> None:
            make(self, *args, **options)
            came.touch()  # its heart beats: who asks from now on gets an answer with it

        Membership.__init__ = init  # type: ignore[method-assign]
        return elastic_entry._start_work(request)
    at_the_end(die_behind_the_sum)
    real, tries = dist.all_reduce, list[int]()

    def all_reduce(tensor: Any, *args: Any, **options: Any) -> Any:
        if tensor.dim() == 0 and not tries:  # the number of broken images, with which a run is concluded
            tries.append(1)
            deadline = time.monotonic() + 150
            while not came.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            raise RuntimeError("[/test/gloo/transport/tcp/pair.cc:1] Connection closed by peer")
        return real(tensor, *args, **options)

    dist.all_reduce = all_reduce
    return elastic_entry._start_work(request)


def stop_and_lose_contact(request: TrainRequest) -> int:
    """One worker is told to stop in its third step; in the fourth, another has the sum that says so, and no contact."""
    real, totals, stops = StepTotals.__init__, [], _is_the_first("stop")

    def init(self: StepTotals, *args: Any) -> None:
        real(self, *args)
        totals.append(1)
        if stops and len(totals) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        if not stops and bool(self["stop_wanted"] > 0) and _is_the_first("fault"):
            raise RuntimeError("[/test/gloo/transport/tcp/pair.cc:1] Connection closed by peer")

    StepTotals.__init__ = init  # type: ignore[method-assign, assignment]
    return elastic_entry._start_work(request)


def lose_contact(request: TrainRequest) -> int:
    at_the_end(lose_contact_behind_the_sum)
    return elastic_entry._start_work(request)


def die(request: TrainRequest) -> int:
    at_the_end(die_behind_the_sum)
    return elastic_entry._start_work(request)


def trained(folder: Path, workers: int, *, resume: bool = False) -> dict[str, Any]:
    request = TrainRequest(small_config(*SETTINGS), folder, resume=resume, elastic=Elastic())
    assert elastic_entry.start_elastic(request, Elastic(), workers) == 0
    model = folder / "model.safetensors"
    digest = hashlib.sha256(model.read_bytes()).hexdigest() if model.exists() else ""
    summary = json.loads((folder / "summary.json").read_text())
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {"weights": digest, "top1": summary["top1"], "status": summary["status"], "steps": steps}


def lost(folder: Path) -> int:
    """How many workers the others have lost: one whose messages do not fit ends, and is replaced."""
    return sum(len(json.loads(line)["lost"]) for line in (folder / "membership.jsonl").read_text().splitlines())


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("torchft", reason="torchft is an extra: pip install megabatch[elastic]")
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
    monkeypatch.setenv("MEGABATCH_TOKEN", "0123456789abcdef" * 2)
    monkeypatch.setenv("TEST_MARKS", str(tmp_path))
    return tmp_path


def test_a_run_that_ends_while_a_host_looks_for_it_has_ended_without_that_host(
    local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers compare the summary with the begin of their launcher, and would wait for others that have gone."""
    times: dict[str, float] = {}

    def found_way(lighthouse: str, token: bytes) -> Any:
        times["summary"] = time.time()
        return SimpleNamespace(address=lighthouse, close=lambda: None)

    def start(*args: Any, started: float, leave_on: Any, **options: Any) -> int:
        times["started"] = started
        assert leave_on == (signal.SIGTERM, signal.SIGHUP)
        return 0

    monkeypatch.setattr("megabatch.workers.door.Way", found_way)
    monkeypatch.setattr(elastic_entry, "start_elastic_workers", start)
    request = TrainRequest(small_config(), local / "run", elastic=Elastic("127.0.0.1:1"))
    assert elastic_entry.start_elastic(request, Elastic("127.0.0.1:1"), 1) == 0
    assert times["started"] < times["summary"]


@pytest.mark.slow
@pytest.mark.parametrize("work", [lose_contact, die])
def test_workers_that_part_in_the_last_evaluation_conclude_together(
    work: Callable[[TrainRequest], int], local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some have its result and conclude, one has not and would evaluate again: sums of other sizes end processes."""
    wanted = trained(local / "undisturbed", 1)
    monkeypatch.setattr(elastic_entry, "_start_work", work)
    assert trained(local / "run", 3) == wanted
    assert (local / "fault").exists()
    assert lost(local / "run") == int(work is die)


@pytest.mark.slow
def test_one_that_comes_while_the_others_conclude_concludes_with_them(
    local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = trained(local / "undisturbed", 1)
    monkeypatch.setattr(elastic_entry, "_start_work", die_and_come_again)
    assert trained(local / "run", 3) == wanted
    changes = [json.loads(line) for line in (local / "run" / "membership.jsonl").read_text().splitlines()]
    # Whether the others had met without the lost one before the new one came is a matter of time.
    assert [sum(len(one[what]) for one in changes) for what in ("lost", "joined")] == [1, 1]
    assert {one["step"] for one in changes} == {STEPS}


@pytest.mark.slow
def test_a_stop_that_one_worker_has_not_heard_of_stops_all(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who have heard of it conclude; the other takes their state, and would make the next step."""
    wanted = trained(local / "undisturbed", 1)
    real = elastic_entry._start_work
    monkeypatch.setattr(elastic_entry, "_start_work", stop_and_lose_contact)
    stopped = trained(local / "run", 3)
    assert (local / "fault").exists()
    assert (stopped["status"], stopped["weights"], stopped["steps"]) == ("stopped", "", [1, 2, 3, 4])
    assert lost(local / "run") == 0
    monkeypatch.setattr(elastic_entry, "_start_work", real)
    assert trained(local / "run", 2, resume=True) == wanted
