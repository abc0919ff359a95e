"""The ssh script, run with a stand-in for ssh that executes on this machine."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from megabatch.errors import ConfigError
from megabatch.launch.ssh import ssh_script
from tests.launch.test_request import request

# Notes host and command, prints the command's words, fails on the host that is told to.
SSH = """#!/bin/bash
while [ "${1:0:1}" = "-" ]; do [ "$1" = "-o" ] && shift; shift; done
host=$1; shift
echo "$host" >> "$NOTES/hosts"
if [ "$host" = "${BAD_HOST:-}" ]; then exit 7; fi
if [ -n "${BAD_HOST:-}" ]; then exec sleep 60; fi
printf 'ran %s\\n' "$*"
"""


def run(script: str, folder: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    (folder / "bin").mkdir()
    fake = folder / "bin" / "ssh"
    fake.write_text(SSH)
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    env = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "NOTES": str(folder)} | extra
    return subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=50, check=False)


def test_every_host_gets_the_health_check_and_then_the_training(tmp_path: Path) -> None:
    text = ssh_script(request(recipe="my recipe.toml"), ("node1", "me@node2"), directory="/opt/my tree")
    done = run(text, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "hosts").read_text().split().count("node1") == 2
    lines = done.stdout.splitlines()
    for host in ("node1", "me@node2"):
        mine = [line for line in lines if line.startswith(f"{host}: ran ")]
        assert "megabatch doctor" in mine[0]
        assert "megabatch train 'my recipe.toml' --output /shared/runs/a --resume" in mine[1]
        assert "cd '/opt/my tree' && exec" in mine[1]
        assert "--rdzv-endpoint node1:29501" in mine[1]
    assert lines[-1] == "run folder /shared/runs/a"


def test_one_host_that_fails_stops_the_others(tmp_path: Path) -> None:
    done = run(ssh_script(request(), ("good", "bad")), tmp_path, BAD_HOST="bad")
    assert done.returncode != 0
    assert "run folder" not in done.stdout


@pytest.mark.parametrize("hosts", [("a",), ("a", "a"), ("a", "-oProxyCommand=x"), ("a", "b c"), ("a", "$(id)")])
def test_hosts_that_are_none(hosts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        ssh_script(request(), hosts)
