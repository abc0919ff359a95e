"""How an error travels from a worker to the one line its user sees, and how the launcher's endings are told apart."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.launcher.api as launcher_api
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megabatch.errors import ConfigError, LaunchError, MegabatchError
from megabatch.train.launch import (
    ERROR_FILE_VARIABLE,
    LAUNCHED_VARIABLE,
    error_was_left,
    leave_error,
    run_as_worker,
    start_workers,
)
from megabatch.train.world import World

WORLD = World(1, 4, 1, 4, "torchrun", "127.0.0.1", 0)


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
        def elastic_launch(config: Any, entry: Callable[..., object]) -> Callable[..., None]:
            assert entry is print
            return lambda *args: behaviour(config, args)

        monkeypatch.setattr(launcher_api, "elastic_launch", elastic_launch)

    yield install
    logging.getLogger("torch.distributed.elastic").setLevel(level)


def failure(exitcode: int) -> ChildFailedError:
    one = ProcessFailure(local_rank=1, pid=1, exitcode=exitcode, error_file="not there")
    return ChildFailedError("worker", {1: one})


def test_workers_call_the_function_as_often_as_asked(pretend: Callable[[Behaviour], None]) -> None:
    seen: list[Any] = []

    def run(config: Any, words: tuple[str, ...]) -> None:
        assert words == ("train", "demo")
        assert os.environ[LAUNCHED_VARIABLE] == "1"
        assert Path(os.environ[ERROR_FILE_VARIABLE]).parent.is_dir()
        assert os.environ["OMP_NUM_THREADS"] == "1"
        seen.append(config)

    pretend(run)
    assert start_workers(3, print, "train", "demo", max_restarts=2) == 0
    assert (seen[0].nproc_per_node, seen[0].max_restarts, seen[0].max_nodes) == (3, 2, 1)
    assert "SIGUSR1" in seen[0].signals_to_handle
    assert not Path(os.environ[ERROR_FILE_VARIABLE]).parent.exists()
    assert start_workers(1, print, "train", "demo") == 0
    assert seen[0].run_id != seen[1].run_id


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_is_returned(pretend: Callable[[Behaviour], None], number: signal.Signals) -> None:
    def run(_config: Any, _words: tuple[str, ...]) -> None:
        raise SignalException("stop", number)

    pretend(run)
    assert start_workers(2, print) == number


@pytest.mark.parametrize("dies", [True, False])
def test_the_error_a_worker_left_is_raised_word_for_word(pretend: Callable[[Behaviour], None], dies: bool) -> None:
    def run(_config: Any, _words: tuple[str, ...]) -> None:
        assert leave_error("the data path x does not exist; give another", os.environ)
        if dies:
            raise failure(2)

    pretend(run)
    with pytest.raises(MegabatchError) as caught:
        start_workers(2, print, max_restarts=3)
    assert str(caught.value) == "the data path x does not exist; give another"


@pytest.mark.parametrize(("exitcode", "how"), [(-9, "SIGKILL"), (-11, "SIGSEGV"), (1, "exit code 1")])
def test_workers_that_keep_dying_are_one_line(pretend: Callable[[Behaviour], None], exitcode: int, how: str) -> None:
    def run(_config: Any, _words: tuple[str, ...]) -> None:
        raise failure(exitcode)

    pretend(run)
    with pytest.raises(LaunchError) as caught:
        start_workers(2, print, max_restarts=3)
    assert f"worker 1 ended with {how} and 3 restarts did not help" in str(caught.value)
    assert "--resume" in str(caught.value)
    assert "\n" not in str(caught.value)


def refuse() -> int:
    raise ConfigError("given a, needed b, do c")


def test_work_done_gives_its_exit_code() -> None:
    assert run_as_worker(lambda: 0, WORLD, {}) == 0


def test_without_our_launcher_a_users_error_is_raised() -> None:
    with pytest.raises(ConfigError, match="do c"):
        run_as_worker(refuse, WORLD, {})


def test_a_bug_is_not_taken_for_a_lost_connection() -> None:
    def bug() -> int:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        run_as_worker(bug, WORLD, {})


def _ends(body: str, **variables: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import os\n"
        "from megabatch.errors import *\n"
        "from megabatch.train.launch import run_as_worker\n"
        "from megabatch.train.world import World\n"
        f"def work():\n    {body}\n"
        "run_as_worker(work, World(1, 4, 1, 4, 'torchrun', '127.0.0.1', 0), os.environ)\n"
    )
    environment = os.environ | variables
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("raise CommunicationError('rank 3 is silent')", "megabatch: rank 3 is silent\n"),
        (
            "raise RuntimeError('[/x/gloo/transport/tcp/pair.cc:1] Connection closed by peer')",
            "megabatch: worker 1 of 4 lost its connection to another worker\n",
        ),
    ],
)
def test_a_lost_worker_ends_this_one_for_a_restart(body: str, line: str) -> None:
    done = _ends(body)
    assert (done.returncode, done.stderr) == (1, line)


def test_a_users_error_is_left_for_the_launcher(tmp_path: Path) -> None:
    done = _ends("raise ConfigError('do c')", **{ERROR_FILE_VARIABLE: str(tmp_path / "error")})
    assert (done.returncode, done.stderr) == (2, "")
    assert (tmp_path / "error").read_text() == "do c"
