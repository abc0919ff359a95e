"""Restarts under torchrun on several hosts, and strangers at the launcher's store."""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest
from torch._C._distributed_c10d import TCPStore

from tests.system.runs import REPOSITORY, command, rows_of, start
from tests.system.test_launch import wait_for_rows, workers_of

LONG = ("train.epochs=20", "train.max_steps=120", "checkpoint.every_steps=2")


@pytest.mark.parametrize("of_main", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_worker_that_one_of_two_agents_loses_costs_one_restart(of_main: bool, tmp_path: Path) -> None:
    """The agents count restarts differently: one lost a worker, the other was only told to start its own again."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    folder = tmp_path / "run"
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    agent += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "two-agents"]
    agent += ["--local-addr", "127.0.0.1", "--max-restarts", "1", "-m", "megabatch"]
    words = command(folder, overrides=LONG)[3:]
    variables = {"PYTHONPATH": str(REPOSITORY), "GLOO_SOCKET_IFNAME": "lo"}
    agents = [start([*agent, *words], **variables) for _ in range(2)]
    try:
        wait_for_rows(folder, agents[0])
        workers = [psutil.Process(one.pid).children()[0] for one in agents]
        main = next(worker for worker in workers if worker.environ()["RANK"] == "0")
        next(worker for worker in workers if (worker == main) == of_main).kill()
        said = [one.communicate(timeout=200) for one in agents]
    finally:
        for one in agents:
            one.kill()
    assert [one.returncode for one in agents] == [0, 0], said
    assert "resuming after step" in "".join(out for out, _ in said)
    assert [row["step"] for row in rows_of(folder)] == list(range(1, 121))
    assert json.loads((folder / "environment.json").read_text())["attempt"] == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the workers' environment")
def test_the_launcher_listens_at_the_loopback_address_and_a_stranger_does_not_choose_the_folder(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    process = start(command(folder, "--workers", "2", overrides=("train.epochs=20", "train.max_steps=60")))
    launcher = psutil.Process(process.pid)
    ports: list[int] = []
    while not ports and process.poll() is None:
        listening = [one.laddr for one in launcher.net_connections("inet") if one.status == psutil.CONN_LISTEN]
        assert {address.ip for address in listening} <= {"127.0.0.1"}
        ports = [address.port for address in listening]
        time.sleep(0.02)  # the launcher needs the core too
    assert ports, process.communicate()
    stranger = TCPStore("127.0.0.1", ports[0], wait_for_workers=False)
    for key in ("megabatch-run-folder", "run folder", "run-0/run folder"):  # the first is how it once was
        stranger.set(key, str(elsewhere))
    wait_for_rows(folder, process)
    for worker in workers_of(process):
        found = {one.laddr.ip for one in worker.net_connections("inet") if one.status == psutil.CONN_LISTEN}
        assert found <= {"127.0.0.1", "::1"}
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert not elsewhere.exists()
