"""The Slurm script: whole shell, right options; tests/system/test_slurm.py runs one under a real Slurm. The ssh script,
run with a stand-in for ssh that executes on this machine."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from megabatch.errors import ConfigError
from megabatch.launch.script import slurm_script, ssh_script
from tests.launch.test_request import request


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


def test_options_of_the_job() -> None:
    wanted = request(gpus_per_node=4, cores_per_worker=8, time_limit="02:00:00", grace_seconds=300, name="run-1")
    found = directives(slurm_script(wanted, "gpu", "team", ("--exclusive",)))
    assert found == [
        *("--job-name=run-1", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=32", "--gpus-per-node=4"),
        *("--partition=gpu", "--account=team", "--time=02:00:00", "--signal=B:USR1@300", "--requeue"),
        *("--open-mode=append", "--output=/shared/runs/run-1-%j.log", "--exclusive"),
    ]


def test_directives_stand_before_the_first_command() -> None:
    lines = slurm_script(request()).splitlines()
    last = max(index for index, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(line.startswith("#") for line in lines[: last + 1])


@pytest.mark.parametrize("health_check", [True, False])
def test_the_script_is_whole_shell_whatever_the_names(health_check: bool) -> None:
    wanted = request(
        recipe="my recipe.toml", overrides=("a='x y'", 'b="$(id)"'), data="/it's", health_check=health_check
    )
    text = slurm_script(wanted)
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("megabatch doctor" in text) is health_check
    # What bash would hand to the command is what was given.
    words = text[text.index("-m megabatch train") :].partition(" &\n")[0].removeprefix("-m megabatch ")
    printed = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {words}"], text=True, capture_output=True, check=True
    ).stdout
    assert printed.splitlines()[:2] == ["train", "my recipe.toml"]
    assert {"a='x y'", 'b="$(id)"', "/it's"} <= set(printed.splitlines())


def test_no_line_of_its_own_can_be_smuggled_in() -> None:
    for arguments in (("x\n#SBATCH --uid=0",), ("", "a b"), ("", "", ("--x y",))):
        with pytest.raises(ConfigError):
            slurm_script(request(), *arguments)
    with pytest.raises(ConfigError):
        slurm_script(request(output="/shared/a b/run"))  # the log's name has no quoting


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
