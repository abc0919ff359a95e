"""A worker's end decides whether the launcher tries again; the real ends are seen from outside, in processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megabatch.errors import ConfigError
from megabatch.train.launch import ERROR_FILE_VARIABLE
from megabatch.train.worker import run_as_worker
from megabatch.train.world import World

WORLD = World(1, 4, 1, 4, "torchrun", "127.0.0.1", 0)


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
        "from megabatch.train.worker import run_as_worker\n"
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
