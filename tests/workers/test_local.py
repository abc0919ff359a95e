"""How workers are started, restarted and told to stop, and how an error travels to the one line its user sees."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megabatch.errors import ConfigError, LaunchError, MegabatchError
from megabatch.workers.error_file import ERROR_FILE_VARIABLE, leave_error
from megabatch.workers.local import run_as_worker, start_elastic_workers, start_workers
from megabatch.workers.world import LAUNCHED_VARIABLE, World

WORLD = World(1, 4, 1, 4, "torchrun", "127.0.0.1", 0)


# What the workers of the tests below do. Each attempt of each rank leaves a file in a folder.


def _mark(folder: str) -> tuple[int, int]:
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK", LAUNCHED_VARIABLE, "OMP_NUM_THREADS")
    (Path(folder) / f"{rank}.{attempt}").write_text(" ".join(os.environ[name] for name in names))
    return rank, attempt


def mark(folder: str) -> None:
    _mark(folder)


def die_until(folder: str, good_attempt: int, code: int) -> None:
    """Rank 1 ends badly in the attempts before `good_attempt`; the other hangs until it is killed."""
    rank, attempt = _mark(folder)
    if attempt < good_attempt:
        if rank == 1:
            while not (Path(folder) / f"0.{attempt}").exists():  # the other is killed soon after this one's end
                time.sleep(0.01)
            os._exit(code) if code >= 0 else os.kill(os.getpid(), -code)
        signal.pause()


def complain(folder: str) -> None:
    rank, _ = _mark(folder)
    if rank == 0:
        leave_error("the data path x does not exist; give another", os.environ)
        os._exit(2)
    signal.pause()


def ask_to_stop(folder: str) -> None:
    """Rank 0 signals the launcher once both workers listen; both end when the signal has reached them."""
    rank, _ = _mark(folder)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # from here on it waits until it is taken
    (Path(folder) / f"ready.{rank}").touch()
    if rank == 0:
        while not (Path(folder) / "ready.1").exists():
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGUSR1)
    assert signal.sigtimedwait([signal.SIGUSR1], 60) is not None


def marks(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name[0].isdigit())


def test_workers_call_the_function_and_find_their_rank(tmp_path: Path) -> None:
    assert start_workers(3, mark, str(tmp_path)) == 0
    assert marks(tmp_path) == ["0.0", "1.0", "2.0"]
    assert (tmp_path / "2.0").read_text() == f"3 3 2 {os.getpid()} {os.environ['OMP_NUM_THREADS']}"


@pytest.mark.parametrize("start", [start_workers, start_elastic_workers])
def test_more_workers_than_any_machine_has_are_refused(start: Callable[..., int], tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="--workers 99999999999; at most 1,024 local workers"):
        start(99999999999, mark, str(tmp_path))


def test_a_group_that_lost_a_worker_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megabatch.workers.local._PATIENCE_SECONDS", 0.2)
    assert start_workers(2, die_until, str(tmp_path), 2, 1, max_restarts=3) == 0
    assert marks(tmp_path) == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]


@pytest.mark.parametrize(("code", "how"), [(-9, "SIGKILL"), (3, "exit code 3")])
def test_workers_that_keep_dying_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, how: str
) -> None:
    monkeypatch.setattr("megabatch.workers.local._PATIENCE_SECONDS", 0.2)
    with pytest.raises(LaunchError) as caught:
        start_workers(2, die_until, str(tmp_path), 9, code, max_restarts=1)
    assert f"rank 1 ended with {how} and 1 restarts did not help" in str(caught.value)
    assert "--resume" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert marks(tmp_path) == ["0.0", "0.1", "1.0", "1.1"]


def test_the_error_a_worker_left_is_raised_word_for_word_and_nothing_is_tried_again(tmp_path: Path) -> None:
    with pytest.raises(MegabatchError) as caught:
        start_workers(2, complain, str(tmp_path), max_restarts=3)
    assert str(caught.value) == "the data path x does not exist; give another"
    assert set(marks(tmp_path)) <= {"0.0", "1.0"}


def test_a_signal_reaches_the_workers_and_is_returned(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    assert start_workers(2, ask_to_stop, str(tmp_path), max_restarts=3) == signal.SIGUSR1
    assert signal.getsignal(signal.SIGUSR1) == before
    assert marks(tmp_path) == ["0.0", "1.0"]


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
        "from megabatch.workers.local import run_as_worker\n"
        "from megabatch.workers.world import World\n"
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
            "megabatch: rank 1 of 4 lost its connection to another worker\n",
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


def test_a_worker_does_not_outlive_the_launcher_of_ours_that_started_it() -> None:
    worker = (
        "import os, time\nfrom megabatch.workers.local import run_as_worker\n"
        "from megabatch.workers.world import ALONE\n"
        "def work():\n    print('started', flush=True)\n    while True: time.sleep(1)\n"
        "run_as_worker(work, ALONE, os.environ)\n"
    )
    launcher = (
        "import os, subprocess, sys\n"
        f"environ = os.environ | {{{LAUNCHED_VARIABLE!r}: str(os.getpid())}}\n"
        "subprocess.run([sys.executable, '-c', sys.argv[1]], env=environ)\n"
    )
    with subprocess.Popen([sys.executable, "-c", launcher, worker], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.kill()
        assert process.stdout.read() == ""  # the worker holds the pipe open for as long as it lives
