"""Hosts of an elastic run that meet at one lighthouse; here a host is a command of its own."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.system.runs import command, rows_of, start
from tests.system.test_elastic import SETTINGS
from tests.system.test_launch import wait_for_rows

pytest.importorskip("torchft", reason="torchft is an extra: pip install megabatch[elastic]")

Host = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """Starts one more host: `host("--workers", "2", overrides=...)`."""
    from megabatch.workers.door import GuardedLighthouse

    token = secrets.token_hex(32)
    lighthouse = GuardedLighthouse("127.0.0.1:0", token.encode())
    started: list[subprocess.Popen[str]] = []

    def start_host(*words: str, overrides: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        typed = command(tmp_path / "run", "--elastic", lighthouse.address, *words, overrides=(*SETTINGS, *overrides))
        started.append(start(typed, MEGABATCH_TOKEN=token))
        return started[-1]

    yield start_host
    for process in started:
        process.kill()
        process.communicate(timeout=60)
    lighthouse.close()


LONG = ("train.max_steps=100000",)


@pytest.mark.slow
def test_a_host_with_other_settings_is_refused_by_name_and_the_run_goes_on(host: Host, tmp_path: Path) -> None:
    """Each of these makes messages of another size, which would end the others too."""
    healthy = host(overrides=LONG)
    wait_for_rows(tmp_path / "run", healthy)
    wrong = {
        "comm.bucket_mb is '1.0' here and '0.02' there": ("comm.bucket_mb=1",),
        "train.evaluation_batch_size is '7' here": ("train.evaluation_batch_size=7",),
        "--grid is '1x2' here and 'automatic' there": ("--grid", "1x2"),
        "threads is '2' here and '1' there": ("train.threads_per_worker=2",),
    }
    refused = {
        said: host(*words, overrides=LONG) if words[0].startswith("--") else host(overrides=(*LONG, *words))
        for said, words in wrong.items()
    }
    for said, process in refused.items():
        out, err = process.communicate(timeout=150)
        assert process.returncode == 2, f"{out}\n{err}"
        assert said in err.splitlines()[-1]
    steps = len(rows_of(tmp_path / "run"))
    wait_for_rows(tmp_path / "run", healthy, at_least=steps + 5)
    assert not (tmp_path / "run" / "membership.jsonl").exists()  # nobody has joined
