"""The Slurm script: whole shell, right options; tests/system/test_slurm.py runs one under a real Slurm. The ssh script,
run with a stand-in for ssh that executes on this machine."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megabatch.errors import ConfigError, MegabatchError, WriteError
from megabatch.launch.kubernetes import container_file, kubernetes_manifest
from megabatch.launch.script import LaunchRequest, Site, hand_over, plain, slurm_script, ssh_script, word


def request(**given: Any) -> LaunchRequest:
    values: dict[str, Any] = {"recipe": "demo", "output": "/shared/runs/a", "nodes": 2, "workers_per_node": 4}
    return LaunchRequest(**(values | given))


def test_words_always_resume_and_carry_every_setting() -> None:
    words = request(data="/images", grid="2x4", overrides=("train.epochs=1", "model.name=resnet8")).train_words()
    assert words == [
        *("train", "demo", "--output", "/shared/runs/a", "--resume", "--data", "/images", "--grid", "2x4"),
        *("--set", "train.epochs=1", "--set", "model.name=resnet8"),
    ]


@pytest.mark.parametrize("text", ["a b", "$(rm x)", "`id`", "it's", 'a"b', ";", "-x", "\u00e9"])
def test_a_word_stays_one_word(text: str) -> None:
    assert shlex.split(word(text)) == [text]


def test_what_cannot_be_carried_is_refused() -> None:
    for text in ("a\nb", "a\rb", "a\0b"):
        with pytest.raises(ConfigError, match="line break"):
            word(text)
    for text in ("a b", "x;y", "$HOME", "", "a\n#SBATCH --uid=0"):
        with pytest.raises(ConfigError):
            plain(text, "partition")
    assert plain("gpu_4,cpu-1", "partition") == "gpu_4,cpu-1"


@pytest.mark.parametrize("given", [{"gpus_per_node": 3}, {"name": "-x"}, {"name": "a b"}, {"name": ""}, {"output": ""}])
def test_requests_that_cannot_work(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        request(**given)


def test_recipes_overrides_and_grids_are_checked() -> None:
    request(overrides=("train.epochs=1",), grid="2x4")
    request(recipe="/only/on/the/cluster.toml", overrides=("what.ever=1",))
    for wrong in ({"recipe": "dmeo"}, {"overrides": ("train.epoch=1",)}, {"grid": "2x3"}):
        with pytest.raises(MegabatchError):
            request(**wrong)


def test_a_script_is_printed_or_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hand_over("text\n", None)
    assert capsys.readouterr().out == "text\n"
    hand_over("text\n", tmp_path / "a.sh")
    assert (tmp_path / "a.sh").read_text() == "text\n"
    assert "written" in capsys.readouterr().out
    with pytest.raises(WriteError, match=r"there is no folder .*; make it"):
        hand_over("text\n", tmp_path / "none" / "a.sh")


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


def test_options_of_the_job() -> None:
    wanted = request(gpus_per_node=4, cores_per_worker=8, time_limit="02:00:00", grace_seconds=300, name="run-1")
    found = directives(slurm_script(wanted, Site("gpu", "team", "me@example.org", extra=("--exclusive",))))
    assert found == [
        *("--job-name=run-1", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=32", "--gpus-per-node=4"),
        *("--partition=gpu", "--account=team", "--mail-user=me@example.org", "--mail-type=END,FAIL,REQUEUE"),
        *("--time=02:00:00", "--signal=B:USR1@300", "--requeue"),
        *("--open-mode=append", "--output=run-1-%j.log", "--exclusive"),
    ]


def test_directives_stand_before_the_first_command() -> None:
    lines = slurm_script(request()).splitlines()
    last = max(index for index, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(line.startswith("#") for line in lines[: last + 1])


@pytest.mark.parametrize("health_check", [True, False])
def test_the_script_is_whole_shell_whatever_the_names(health_check: bool) -> None:
    wanted = request(
        recipe="/my recipe.toml", overrides=("a='x y'", 'b="$(id)"'), data="/it's", health_check=health_check
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
    assert printed.splitlines()[:2] == ["train", "/my recipe.toml"]
    assert {"a='x y'", 'b="$(id)"', "/it's"} <= set(printed.splitlines())


def test_no_line_of_its_own_can_be_smuggled_in() -> None:
    for site in (
        *(Site(partition="x\n#SBATCH --uid=0"), Site(account="a b"), Site(mail="a@b;c"), Site(extra=("--x y",))),
        *(Site(setup="a\nb"), Site(container="a b")),
    ):
        with pytest.raises(ConfigError):
            slurm_script(request(), site)


def test_cores_are_always_asked_for_and_taken_by_every_step() -> None:
    for given, cores in (({}, 4), ({"gpus_per_node": 4}, 16), ({"cores_per_worker": 3}, 12)):
        text = slurm_script(request(**given))
        assert f"--cpus-per-task={cores}" in directives(text)
        assert 'srun=(srun --cpus-per-task="$SLURM_CPUS_PER_TASK")' in text
        assert "\nsrun --" not in text  # each step goes through the array


def test_a_task_that_fails_ends_the_others_at_once() -> None:
    """Ranks that wait in NCCL hear nothing of the one that failed."""
    lines = slurm_script(request()).splitlines()
    assert [line.startswith('"${srun[@]}" --kill-on-bad-exit=1 ') for line in lines if '"${srun[@]}"' in line] == [
        True
    ] * 2


def test_setup_and_container(tmp_path: Path) -> None:
    setup = tmp_path / "my setup.sh"
    setup.write_text("module_loaded=$NOT_SET_ANYWHERE\n")  # sites' own scripts read variables that may not be set
    text = slurm_script(request(data="/images"), Site(setup=str(setup), container="registry.example/megabatch:1"))
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    until = text[: text.index("\nhead=")]
    begin = f"{until}\nprintf '%s\\n' \"${{srun[@]}}\""
    printed = subprocess.run(
        ["bash", "-c", begin], env={"SLURM_CPUS_PER_TASK": "4"}, text=True, capture_output=True, check=True
    ).stdout
    assert printed.splitlines() == [
        *("srun", "--cpus-per-task=4", "--container-image=registry.example/megabatch:1"),
        "--container-mounts=/shared/runs:/shared/runs,/images:/images",
    ]
    with pytest.raises(ConfigError, match="absolute"):
        slurm_script(request(output="runs/a"), Site(container="x"))


def test_a_recipe_without_its_images_is_refused_before_it_is_queued() -> None:
    with pytest.raises(ConfigError, match="add --data PATH"):
        request(recipe="mikami2018")
    request(recipe="mikami2018", data="/images")
    request(recipe="mikami2018", overrides=("data.path=/images",))


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
    text = ssh_script(request(recipe="/my recipe.toml"), ("node1", "me@node2"), directory="/opt/my tree")
    done = run(text, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "hosts").read_text().split().count("node1") == 2
    lines = done.stdout.splitlines()
    for host in ("node1", "me@node2"):
        mine = [line for line in lines if line.startswith(f"{host}: ran ")]
        assert "megabatch doctor" in mine[0]
        assert "megabatch train '/my recipe.toml' --output /shared/runs/a --resume" in mine[1]
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


def test_an_elastic_job_has_a_lighthouse_and_survives_the_loss_of_a_node(tmp_path: Path) -> None:
    text = slurm_script(request(recipe="/my recipe.toml", output="/shared/a", elastic=True, min_workers=3))
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--no-kill" in directives(text)
    assert 'lighthouse --bind "$address:$port" --min-workers 3 &' in text
    assert (
        '"${srun[@]}" --no-kill --kill-on-bad-exit=0 --wait=0 "$python" -m '
        "megabatch train '/my recipe.toml' --output "
        '/shared/a --resume --workers 4 --min-workers 3 --elastic "$address:$port" &' in text
    )
    assert "torch.distributed.run" not in text


# Runs what it is told to run here, with a stand-in for Python that notes its words and whether it knows the token.
LOCAL_SSH = """#!/bin/bash
while [ "${1:0:1}" = "-" ]; do [ "$1" = "-o" ] && shift; shift; done
echo "$1" >> "$NOTES/hosts"
[ "$1" = "${BAD_HOST:-}" ] && [[ "$2" == *" train "* ]] && exit 7
exec bash -c "$2"
"""
LOCAL_PYTHON = """#!/bin/bash
if [ "$1" = "-c" ]; then echo 0123456789abcdef0123456789abcdef; exit; fi
echo "token file ${MEGABATCH_TOKEN_FILE:-none} ran $*"
if [ "$3" = "lighthouse" ]; then touch "$NOTES/lighthouse"; exec sleep 60; fi
until [ -e "$NOTES/lighthouse" ]; do sleep 0.05; done
"""


@pytest.mark.parametrize("bad_host", ["", "me@node2"])
def test_an_elastic_run_over_ssh(bad_host: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name, content in (("ssh", LOCAL_SSH), ("our python", LOCAL_PYTHON)):
        (tmp_path / "bin" / name).write_text(content)
        (tmp_path / "bin" / name).chmod(0o755)
    output = f"{tmp_path}/my runs/a"
    wanted = request(output=output, python=f"{tmp_path}/bin/our python", elastic=True)
    text = ssh_script(wanted, ("node1", "me@node2"), directory=str(tmp_path))
    assert "0123456789abcdef" not in text
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "NOTES": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", text],
        env=environment | {"BAD_HOST": bad_host},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    token = Path(f"{output}.token")
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert (tmp_path / "hosts").read_text().split().count("node1") == 3  # prepared, lighthouse, workers
    assert "lighthouse --min-workers 1 --bind " in done.stdout
    trained = [line for line in done.stdout.splitlines() if " train demo " in line]
    assert len(trained) == (1 if bad_host else 2)
    assert all(f"token file {token} ran -m megabatch train demo" in line and ":29500" in line for line in trained)
    assert ("me@node2 ended with exit code 7" in done.stdout) is bool(bad_host)
    assert "0123456789abcdef" not in done.stdout + done.stderr


@pytest.mark.parametrize("given", [{"gpus_per_node": 4}, {"overrides": ("comm.sums=float",)}, {"min_workers": 9}])
def test_elastic_runs_that_cannot_work(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="elastic"):
        request(elastic=True, **given)


EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_examples_are_what_the_command_writes() -> None:
    of_slurm = LaunchRequest("demo", "runs/demo", 4, 8, gpus_per_node=8, time_limit="01:00:00")
    assert (EXAMPLES / "slurm" / "demo.sbatch").read_text() == slurm_script(of_slurm)
    of_kubernetes = LaunchRequest("demo", "/runs/demo", 4, 8, gpus_per_node=8)
    manifest = kubernetes_manifest(of_kubernetes, "registry.example/megabatch:1", "runs")
    assert (EXAMPLES / "kubernetes" / "demo.json").read_text() == manifest
    assert (EXAMPLES / "kubernetes" / "Containerfile").read_text() == container_file(cuda=True)
