"""Hosts of an elastic run that meet at one lighthouse; here a host is a command of its own."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from megabatch.machine import host_name, processor_name
from tests.system.runs import command, rows_of, start
from tests.system.test_elastic import SETTINGS, membership_of
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


def wait_for_workers(folder: Path, count: int, process: subprocess.Popen[str], seconds: float = 100) -> None:
    """Until the newest change of membership has left so many."""
    deadline = time.monotonic() + seconds
    while not (folder / "membership.jsonl").exists() or membership_of(folder)[-1]["workers"] != count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"never {count} workers"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_host_that_is_taken_away_leaves_and_the_others_go_on(
    number: signal.Signals, host: Host, tmp_path: Path
) -> None:
    """Its exit code does not say that the run is finished; nor does that of the last one, which stops it."""
    run = tmp_path / "run"
    stays = host(overrides=LONG)
    wait_for_rows(run, stays)
    goes = host("--workers", "2", overrides=LONG)
    wait_for_workers(run, 3, stays)
    goes.send_signal(number)
    out, err = goes.communicate(timeout=100)
    assert goes.returncode == 128 + number, f"{out}\n{err}"
    assert "left the run after step" in out
    wait_for_workers(run, 1, stays)
    wait_for_rows(run, stays, at_least=len(rows_of(run)) + 5)
    assert not (run / "summary.json").exists()
    stays.send_signal(number)
    out, err = stays.communicate(timeout=100)
    assert stays.returncode == 128 + number, f"{out}\n{err}"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("stopped", len(rows_of(run)))
    assert list((run / "checkpoints").glob(f"step-*{summary['steps']}.pt"))


@pytest.mark.slow
def test_ctrl_c_on_one_host_stops_the_run_on_all(host: Host, tmp_path: Path) -> None:
    run = tmp_path / "run"
    hosts = [host(overrides=LONG)]
    wait_for_rows(run, hosts[0])
    hosts.append(host(overrides=LONG))
    wait_for_workers(run, 2, hosts[0])
    [change] = membership_of(run)
    equipment = {"host": host_name(), "processor": processor_name(), "torch": version("torch"), "threads": "1"}
    assert change["joined_with"] == [{"name": name, **equipment} for name in change["joined"]]  # type: ignore[attr-defined]
    assert len(change["joined"]) == 1  # type: ignore[arg-type]
    hosts[1].send_signal(signal.SIGINT)
    for one in hosts:
        out, err = one.communicate(timeout=100)
        assert one.returncode == 0, f"{out}\n{err}"
    assert json.loads((run / "summary.json").read_text())["status"] == "stopped"
