"""The command line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.netlab import unavailable_reason
from benchmarks.netlab.__main__ import main

reason = unavailable_reason()
if reason is None and not Path("/dev/net/tun").exists():
    reason = "no /dev/net/tun here"
needs_root = pytest.mark.skipif(reason is not None, reason=str(reason))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--network", "equal-host", "--check"], "did you mean 'equal-hosts'"),
        (["--network", "shared-nic"], "no command given"),
        (["--hosts", "0", "--check"], "hosts is 0"),
    ],
)
def test_a_mistake_ends_with_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["--", "true"]) == 2
    assert "must be root" in capsys.readouterr().err


@pytest.mark.root
@needs_root
def test_a_command_runs_on_every_rank_and_the_counters_are_shown(capfd: pytest.CaptureFixture[str]) -> None:
    custom = ["--hosts", "2", "--ranks-per-host", "1", "--rate", "50", "--latency", "1"]
    assert main([*custom, "--counters", "--", "sh", "-c", "echo rank $RANK of $WORLD_SIZE"]) == 0
    output = capfd.readouterr()
    assert output.out == "rank 0 of 2\n"
    assert [line.split()[0] for line in output.err.splitlines()] == ["NIC", "10.77.0.1", "10.77.1.1"]


@pytest.mark.root
@needs_root
def test_a_failing_rank_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--hosts", "2", "--ranks-per-host", "1", "--", "sh", "-c", "exit $RANK"]) == 1
    assert "rank 1 on host 1 ended with 1" in capfd.readouterr().err
