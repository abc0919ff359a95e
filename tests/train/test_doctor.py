"""The doctor's findings: what is there, what is wrong, and what to do about it."""

from __future__ import annotations

import io
import json
import shutil
import socket
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megabatch.data import idx
from megabatch.train.doctor import Finding, examine, print_findings

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
    return next(finding for finding in examine(environ or {}) if finding["name"] == name)


def test_findings_come_in_order_and_a_program_can_read_them() -> None:
    findings = examine({})
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
    assert good["text"] == "torchrun: rank 3 of 8, number 1 of 2 on this host, meeting at head:29400"
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
