"""How an error travels from a worker to the one line its user sees, and how the launcher's endings are told apart."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.launcher.api as launcher_api
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megabatch.errors import LaunchError, MegabatchError
from megabatch.train.launch import (
    ERROR_FILE_VARIABLE,
    LAUNCHED_VARIABLE,
    error_was_left,
    leave_error,
    start_workers,
)


def test_the_first_error_is_the_one_that_is_told(tmp_path: Path) -> None:
    environ = {ERROR_FILE_VARIABLE: str(tmp_path / "error")}
    assert not error_was_left(environ)
    assert leave_error("first: caf\u00e9", environ)
    assert error_was_left(environ)
    assert leave_error("second", environ)
    assert (tmp_path / "error").read_text(encoding="utf-8") == "first: caf\u00e9"


def test_without_our_launcher_there_is_nowhere_to_leave_it() -> None:
    assert not leave_error("lost", {})
    assert not error_was_left({})


def test_a_place_that_is_gone_does_no_harm(tmp_path: Path) -> None:
    """The launcher may have been killed and its scratch folder cleared away."""
    environ = {ERROR_FILE_VARIABLE: str(tmp_path / "gone" / "error")}
    assert leave_error("late", environ)
    assert not error_was_left(environ)


Behaviour = Callable[[Any, tuple[str, ...]], None]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Behaviour], None]]:
    """Puts a function in the place of torch's launcher, and the environment and the log level back at the end."""
    for name in (LAUNCHED_VARIABLE, ERROR_FILE_VARIABLE, "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "set before the test")  # remembered now, put back at the end
        monkeypatch.delenv(name)
    level = logging.getLogger("torch.distributed.elastic").level

    def install(behaviour: Behaviour) -> None:
        def elastic_launch(config: Any, entry: str) -> Callable[..., None]:
            assert entry == sys.executable
            return lambda *words: behaviour(config, words)

        monkeypatch.setattr(launcher_api, "elastic_launch", elastic_launch)

    yield install
    logging.getLogger("torch.distributed.elastic").setLevel(level)


def failure(exitcode: int) -> ChildFailedError:
    one = ProcessFailure(local_rank=1, pid=1, exitcode=exitcode, error_file="not there")
    return ChildFailedError("worker", {1: one})


def test_workers_run_the_command_as_often_as_asked(pretend: Callable[[Behaviour], None]) -> None:
    seen: list[Any] = []

    def run(config: Any, words: tuple[str, ...]) -> None:
        assert words == ("-m", "megabatch", "train", "demo")
        assert os.environ[LAUNCHED_VARIABLE] == "1"
        assert Path(os.environ[ERROR_FILE_VARIABLE]).parent.is_dir()
        assert os.environ["OMP_NUM_THREADS"] == "1"
        seen.append(config)

    pretend(run)
    assert start_workers(3, ["train", "demo"], max_restarts=2) == 0
    assert (seen[0].nproc_per_node, seen[0].max_restarts, seen[0].max_nodes) == (3, 2, 1)
    assert "SIGUSR1" in seen[0].signals_to_handle
    assert not Path(os.environ[ERROR_FILE_VARIABLE]).parent.exists()
    assert start_workers(1, ["train", "demo"], max_restarts=0) == 0
    assert seen[0].run_id != seen[1].run_id


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_is_returned(pretend: Callable[[Behaviour], None], number: signal.Signals) -> None:
    def run(_config: Any, _words: tuple[str, ...]) -> None:
        raise SignalException("stop", number)

    pretend(run)
    assert start_workers(2, [], 0) == number


@pytest.mark.parametrize("dies", [True, False])
def test_the_error_a_worker_left_is_raised_word_for_word(pretend: Callable[[Behaviour], None], dies: bool) -> None:
    def run(_config: Any, _words: tuple[str, ...]) -> None:
        assert leave_error("the data path x does not exist; give another", os.environ)
        if dies:
            raise failure(2)

    pretend(run)
    with pytest.raises(MegabatchError) as caught:
        start_workers(2, [], 3)
    assert str(caught.value) == "the data path x does not exist; give another"


@pytest.mark.parametrize(("exitcode", "how"), [(-9, "SIGKILL"), (-11, "SIGSEGV"), (1, "exit code 1")])
def test_workers_that_keep_dying_are_one_line(pretend: Callable[[Behaviour], None], exitcode: int, how: str) -> None:
    def run(_config: Any, _words: tuple[str, ...]) -> None:
        raise failure(exitcode)

    pretend(run)
    with pytest.raises(LaunchError) as caught:
        start_workers(2, [], 3)
    assert f"worker 1 ended with {how} and 3 restarts did not help" in str(caught.value)
    assert "--resume" in str(caught.value)
    assert "\n" not in str(caught.value)
