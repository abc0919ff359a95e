"""The doctor's findings: what is there, what is wrong, what to do; the map of the world, and a slow line by name."""

from __future__ import annotations

import io
import json
import shutil
import socket
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from megabatch.bench.doctor import (
    Finding,
    axis_findings,
    examine_machine,
    examine_world,
    print_findings,
    slow_lines,
    world_map,
)
from megabatch.comm.grid import ProcessGrid
from megabatch.comm.measure import AxisMeasurement
from megabatch.comm.p2p import Link
from megabatch.comm.shape import GridShape
from megabatch.data import idx
from tests.ranks import run_ranks
from tests.system.runs import REPOSITORY, clean_environment

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29400",
}


@pytest.fixture(autouse=True)
def no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGABATCH_DATA", str(tmp_path))
    monkeypatch.setattr(idx, "SYSTEM_FOLDER", tmp_path / "nowhere")


def found(name: str, environ: dict[str, str] | None = None) -> Finding:
    return next(finding for finding in examine_machine(environ or {}) if finding["name"] == name)


def test_findings_come_in_order_and_a_program_can_read_them() -> None:
    findings = examine_machine({})
    assert [finding["name"] for finding in findings] == [
        *("software", "host", "accelerators", "backends"),
        *("launcher", "host name", "fashion-mnist", "disk"),
    ]
    assert json.loads(json.dumps(findings)) == findings
    for finding in findings:
        assert set(finding) == {"name", "good", "text"}
        assert finding["good"] in (True, False, None)
        assert "\n" not in finding["text"]


def test_the_software_is_named_with_versions() -> None:
    text = found("software")["text"]
    assert "megabatch " in text
    assert "torch 2." in text
    assert found("backends") == {"name": "backends", "good": True, "text": "gloo"}


def test_launchers() -> None:
    assert found("launcher")["good"] is None
    good = found("launcher", TORCHRUN)
    assert good["good"] is True
    assert good["text"] == "torchrun: rank 3 of 8, local rank 1 of 2 on this host, meeting at head:29400"
    bad = found("launcher", {"SLURM_NTASKS": "4"})
    assert bad["good"] is False
    assert "srun" in bad["text"]


def test_a_host_without_an_address_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    finding = found("host name")
    assert finding["good"] is False
    assert "GLOO_SOCKET_IFNAME" in finding["text"]
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "10.1.2.3")
    assert found("host name")["good"] is True
    assert "10.1.2.3" in found("host name")["text"]


def test_data_that_is_there_and_data_that_is_not(tmp_path: Path) -> None:
    finding = found("fashion-mnist")
    assert finding["good"] is None
    assert "megabatch data get fashion-mnist" in finding["text"]
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    for name in idx.FASHION_MNIST_SHA256:
        (folder / f"{name}.gz").touch()
    assert found("fashion-mnist") == {"name": "fashion-mnist", "good": True, "text": str(folder)}


def test_a_full_disk_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    usage = namedtuple("usage", "total used free")
    for free, good in ((0.9e9, False), (2e9, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage(3e9, 0, free))
        finding = found("disk")
        assert finding["good"] is good
        assert f"{free / 1e9:.1f} GB free in {tmp_path}" in finding["text"]


def test_findings_are_printed_one_to_a_line() -> None:
    out = io.StringIO()
    findings: list[dict[str, Any]] = [
        {"name": "a", "good": True, "text": "fine [sort of]"},
        {"name": "host name", "good": False, "text": "bad"},
        {"name": "c", "good": None, "text": "a fact " * 30},
    ]
    print_findings(findings, Console(file=out, width=60, highlight=False, soft_wrap=True))
    assert out.getvalue().splitlines() == [
        "ok  a             fine [sort of]",
        "bad host name     bad",
        "    c             " + "a fact " * 30,
    ]


def _measured(rates: tuple[float, ...], solo: float = 0.0, in_memory: tuple[int, ...] = ()) -> AxisMeasurement:
    lines = tuple((rank, rank + len(rates)) for rank in range(len(rates)))
    kinds = tuple(line in in_memory for line in range(len(rates)))
    return AxisMeasurement(lines, (2e-3,) * len(rates), rates, 0.0, solo, kinds)


def test_a_line_below_half_of_the_median_is_slow() -> None:
    assert slow_lines(_measured((10, 9, 11, 4))) == [3]
    assert slow_lines(_measured((10, 9, 11, 5))) == []
    assert slow_lines(_measured((10, 4))) == [1]  # of two, the faster is the measure
    assert slow_lines(_measured((10,))) == []
    # A cable is slower than memory, and that is no fault of it.
    assert slow_lines(_measured((90, 80, 10, 9), in_memory=(0, 1))) == []
    assert slow_lines(_measured((90, 30, 10, 4), in_memory=(0, 1))) == [1, 3]


def test_findings_name_ranks_and_hosts_of_a_slow_line() -> None:
    hosts = ["a"] * 4 + ["b"] * 4
    whole, slow = axis_findings(_measured((10e6, 9e6, 11e6, 4e6)), "column", hosts)
    assert whole == {
        "name": "column",
        "good": False,
        "text": "4 columns of 2 ranks, 2 ms, 4 to 11 MB/s with all at once",
    }
    assert slow["name"] == "slow link"
    assert slow["good"] is False
    assert slow["text"].startswith("column of ranks 3, 7 (hosts a, b) has 4 MB/s, the median column 10")
    (fine,) = axis_findings(_measured((10e6, 9e6), solo=20e6), "column", [])
    assert fine["good"] is True
    assert fine["text"].endswith("one alone is 2.0 times as fast, so they share a link")
    (inside,) = axis_findings(_measured((10e6, 9e6), in_memory=(0, 1)), "row", [])
    assert inside["text"].endswith("9 to 10 MB/s with all at once, through shared memory")
    (mixed,) = axis_findings(_measured((90e6, 9e6), in_memory=(0,)), "row", [])
    assert mixed["text"].endswith("9 to 90 MB/s with all at once, through shared memory in 1 of them")


def test_the_map_tells_where_ranks_sit() -> None:
    grid, *hosts = world_map(GridShape((2, 4)), ["a"] * 4 + ["b"] * 4, "one host per row")
    assert grid["text"] == "2x4, 8 ranks (one host per row)"
    assert [host["text"] for host in hosts] == [
        "a: ranks 0 to 3 at (0, 0) to (0, 3)",
        "b: ranks 4 to 7 at (1, 0) to (1, 3)",
    ]
    assert all(finding["good"] is None for finding in (grid, *hosts))


def test_rows_that_cross_hosts_are_told() -> None:
    *_, last = world_map(GridShape((2, 4)), ["a", "b"] * 4)
    assert last["name"] == "layout"
    assert last["good"] is False
    assert last["text"].startswith("rows cross hosts though hosts hold several ranks")
    # One rank per host has no choice, and one host has nothing to cross.
    for hosts in ([f"h{rank}" for rank in range(8)], ["a"] * 8, []):
        assert all(finding["good"] is None for finding in world_map(GridShape((2, 4)), hosts))


def test_a_large_map_stays_readable() -> None:
    findings = world_map(GridShape((64, 64)), [f"host{rank // 64}" for rank in range(4096)])
    assert len(findings) == 18
    assert findings[-1]["text"] == "and 48 more hosts"


def _examine(rank: int) -> list[dict[str, Any]]:
    send = Link.send

    def slow_send(self: Link, part: torch.Tensor, to: int, tag: int) -> None:
        if {self.ranks[self.position], self.ranks[to]} == {1, 3}:
            time.sleep(part.numel() * part.element_size() / 0.2e6)
        send(self, part, to, tag)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGABATCH_HOST", f"host{rank // 2}")  # cables run between hosts, rows lie inside them
        grid = ProcessGrid.build("2x2", timeout_seconds=30)
        patch.setattr(Link, "send", slow_send)
        return examine_world(grid, budget_seconds=0.2)


def test_a_slow_cable_is_found_on_real_ranks() -> None:
    answers = run_ranks(4, _examine)
    assert all(answer == answers[0] for answer in answers)
    names = [finding["name"] for finding in answers[0]]
    assert names[0] == "grid"
    assert names.count("column") == names.count("row") == 1
    slow = [finding["text"] for finding in answers[0] if finding["name"] == "slow link"]
    assert any(text.startswith("column of ranks 1, 3 (hosts host0, host1)") for text in slow)
    assert not any(text.startswith("column of ranks 0, 2") for text in slow)
    texts = {finding["name"]: finding["text"] for finding in answers[0]}
    assert "shared memory" in texts["row"]
    assert "shared memory" not in texts["column"]


def test_doctor_under_torchrun_maps_the_world_once() -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "megabatch", "doctor", "--json"],
        cwd=REPOSITORY,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    findings = {finding["name"]: finding["text"] for finding in json.loads(line)}
    assert findings["grid"].startswith("1x2, 2 ranks")
    assert "rank 0 of 2" in findings["launcher"]
    assert "MB/s" in findings["row"]
