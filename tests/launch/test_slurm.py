"""The batch script: whole shell, right options; tests/system/test_slurm.py runs one under a real Slurm."""

from __future__ import annotations

import subprocess

import pytest

from megabatch.errors import ConfigError
from megabatch.launch.slurm import slurm_script
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
