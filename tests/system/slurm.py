"""A real Slurm on this machine alone: controller, node and munge in a folder of their own, ended with the test."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged")

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/node.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/node.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
SchedulerParameters=sched_interval=2,bf_interval=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


@dataclass(frozen=True)
class Slurm:
    """Runs Slurm's commands against this controller."""

    environ: dict[str, str]

    def run(self, *words: str) -> str:
        done = subprocess.run(words, env=self.environ, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def submit(self, *words: str) -> str:
        return self.run("sbatch", "--parsable", *words).split(";")[0].strip()

    def state(self, job: str) -> str:
        fields = dict(word.split("=", 1) for word in self.run("scontrol", "show", "job", job).split() if "=" in word)
        return fields["JobState"]


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.5)


@contextmanager
def open_slurm() -> Iterator[Slurm]:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        why = f"{', '.join(missing)} not installed" if missing else "not root"
        pytest.skip(f"a Slurm of one's own needs root and Debian's slurm-wlm ({why})")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: a socket's path has a limit
    folder.chmod(0o755)
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(64))
    (folder / "munge.key").chmod(0o600)
    host = socket.gethostname().split(".")[0]
    conf = CONF.format(host=host, folder=folder, cores=os.cpu_count(), ports=(_free_port(), _free_port()))
    (folder / "slurm.conf").write_text(conf)
    environ = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
    munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.sock", f"--key-file={folder}/munge.key"]
    munge += [f"--pid-file={folder}/munge.pid", f"--seed-file={folder}/munge.seed", f"--log-file={folder}/munge.log"]
    daemons: list[subprocess.Popen[bytes]] = []
    slurm = Slurm(environ)
    try:
        for words in (munge, ["slurmctld", "-D", "-c"], ["slurmd", "-D", "-c", "-N", host]):
            with open(folder / f"{words[0]}.out", "wb") as out:
                daemons.append(subprocess.Popen(words, env=environ, stdout=out, stderr=out))
            time.sleep(1.5)
        wait_for(lambda: "idle" in _try(slurm, "sinfo", "-h"), 60, "an idle node")
        yield slurm
        _try(slurm, "scancel", "--user", "root")
        time.sleep(1.0)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(20)
        shutil.rmtree(folder, ignore_errors=True)


def _try(slurm: Slurm, *words: str) -> str:
    done = subprocess.run(words, env=slurm.environ, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
