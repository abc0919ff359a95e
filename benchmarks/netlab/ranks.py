"""Starts one process per rank (or one torchrun per host) inside the stations, and waits for all of them, bounded."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megabatch.errors import CommunicationError, LaunchError

from .namespaces import Namespace, inside
from .network import NIC_NAME, Network, Station

__all__ = [
    "DEFAULT_ENVIRONMENT",
    "OWNER_VARIABLE",
    "CompletedRank",
    "Job",
    "check_ranks",
    "end_orphans",
    "port_of_run",
    "rank_environment",
    "run_jobs",
    "torchrun_jobs",
]

OWNER_VARIABLE = "MEGABATCH_NETLAB_OWNER"  # in the environment of everything a laboratory starts
_FIRST_PORT = 29500
_TERM_GRACE_SECONDS = 3.0
_STDERR_TAIL_LINES = 15

# Defaults a user's own environment overrides: ranks share few cores, and addresses have no names to be looked up,
# about which c10d would warn once per connection.
DEFAULT_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@dataclass(frozen=True)
class CompletedRank:
    """How one process ended; under torchrun it is the agent of a host and `rank` its first rank."""

    rank: int
    host: int
    returncode: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool


@dataclass(frozen=True)
class Job:
    """A process to start: where, what, with which additions to the environment."""

    rank: int
    station: Station
    argv: Sequence[str]
    environment: Mapping[str, str]
    stop_signal: signal.Signals = signal.SIGKILL


def owner_tag() -> str:
    """This process: its pid namespace, id and start time, which no later process shares."""
    return _tag_of(os.getpid())


def _tag_of(pid: int) -> str:
    try:
        # Field 22 of stat; the name before it may contain blanks, so count from its closing bracket.
        start = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        start = "gone"
    return f"{Path('/proc/self/ns/pid').stat().st_ino}:{pid}:{start}"


def end_orphans() -> list[int]:
    """Kill processes started by laboratories that no longer exist; return their ids.

    Ranks die with their laboratory, but a process that a rank started itself may outlive a kill -9.
    """
    ended = []
    marker = f"{OWNER_VARIABLE}=".encode()
    our_pid_namespace = owner_tag().split(":")[0]
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
            tag = next((v[len(marker) :].decode() for v in variables if v.startswith(marker)), None)
            if tag is None:
                continue
            pid_namespace, owner, _ = tag.split(":")
            if pid_namespace == our_pid_namespace and tag != _tag_of(int(owner)):
                os.kill(int(entry.name), signal.SIGKILL)
                ended.append(int(entry.name))
        except (OSError, ValueError):
            continue  # it ended while we looked, or is not ours to judge
    return ended


def rank_environment(network: Network, rank: int, port: int) -> dict[str, str]:
    """What torchrun would tell this rank, and where Gloo shall listen."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(network.world_size),
        "LOCAL_RANK": str(rank % network.ranks_per_host),
        "LOCAL_WORLD_SIZE": str(network.ranks_per_host),
        "GROUP_RANK": str(rank // network.ranks_per_host),
        "GROUP_WORLD_SIZE": str(network.hosts),
        "MASTER_ADDR": network.stations[0].address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": NIC_NAME,
        "NETLAB_ADDRESS": network.station_of_rank(rank).address,
        OWNER_VARIABLE: owner_tag(),
    }


def torchrun_jobs(
    network: Network, stations: Sequence[Namespace], argv: Sequence[str], env: Mapping[str, str], port: int
) -> list[Job]:
    """One torchrun agent per host, in the host's first station; each worker moves to the station of its own NIC."""
    per_host = len(stations) // network.hosts
    # torchrun execs this once per worker; the worker must not see the agent's namespace but that of its NIC.
    move = 'eval "net=\\$NETLAB_NET_$LOCAL_RANK"; exec nsenter --net="$net" "$@"'
    worker = ["sh", "-c", move, "sh", *argv] if network.nic == "rank" else list(argv)
    jobs = []
    for host in range(network.hosts):
        first = network.stations[host * per_host]
        options = {
            "nnodes": network.hosts,
            "nproc-per-node": network.ranks_per_host,
            "rdzv-backend": "c10d",
            "rdzv-endpoint": f"{network.stations[0].address}:{port}",
            "rdzv-id": f"netlab-{port}",
            "rdzv-conf": f"is_host={int(host == 0)},timeout=300",
            "local-addr": first.address,
        }
        launcher = [sys.executable, "-m", "torch.distributed.run"]
        launcher += [f"--{name}={value}" for name, value in options.items()]
        nets = {f"NETLAB_NET_{k}": stations[host * per_host + k].paths[0] for k in range(per_host)}
        extra = {"GLOO_SOCKET_IFNAME": NIC_NAME, OWNER_VARIABLE: owner_tag(), **nets, **env}
        jobs.append(Job(first.ranks[0], first, [*launcher, "--no-python", *worker], extra, signal.SIGTERM))
    return jobs


class _Running:
    """A started job with its output on anonymous files, which leave nothing behind."""

    def __init__(self, job: Job, namespace: Namespace, live: bool) -> None:
        self.job = job
        self.out: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `finish`
        self.err: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        base = {**DEFAULT_ENVIRONMENT, **os.environ, "PATH": search}
        self.started = time.monotonic()
        self.ended: float | None = None
        self.timed_out = False
        # setpriv: the kernel ends the rank when we die, even by kill -9. An own session keeps Ctrl-C to us.
        prefix = ["setpriv", "--pdeathsig", job.stop_signal.name.removeprefix("SIG"), "--"]
        with inside(namespace):
            try:
                self.process = subprocess.Popen(
                    [*prefix, *job.argv],
                    env={**base, **job.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=None if live else self.out,
                    stderr=None if live else self.err,
                    start_new_session=True,
                )
            except FileNotFoundError:
                raise LaunchError("the command 'setpriv' is missing; install util-linux to start ranks") from None

    def poll(self) -> bool:
        """Whether it has ended."""
        if self.ended is None and self.process.poll() is not None:
            self.ended = time.monotonic()
        return self.ended is not None

    def signal_group(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def finish(self) -> CompletedRank:
        texts = []
        for stream in (self.out, self.err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
            stream.close()
        return CompletedRank(
            rank=self.job.rank,
            host=self.job.station.host,
            returncode=self.process.returncode,
            stdout=texts[0],
            stderr=texts[1],
            seconds=(self.ended or time.monotonic()) - self.started,
            timed_out=self.timed_out,
        )


def run_jobs(
    jobs: Sequence[Job],
    stations: Sequence[Namespace],
    timeout_seconds: float,
    *,
    live_rank: int | None = None,
    grace_seconds: float | None = None,
) -> list[CompletedRank]:
    """Start all jobs, wait for all of them at most `timeout_seconds`, end what is left, and report each.

    `live_rank` writes to our own terminal instead of being recorded. With `grace_seconds`, one failure leaves the
    others that long; without it they get the whole time, so that a caller can see them find out by themselves.
    """
    running: list[_Running] = []
    deadline = time.monotonic() + timeout_seconds
    failed = False
    try:
        for job in jobs:
            one = _Running(job, stations[job.station.index], job.rank == live_rank)
            running.append(one)  # at once: an exception further on must still find it
        while not _all_ended(running) and time.monotonic() < deadline:
            if grace_seconds is not None and not failed and any(one.process.returncode for one in running):
                failed = True
                deadline = min(deadline, time.monotonic() + grace_seconds)
            time.sleep(0.02)
    finally:
        for one in running:
            one.timed_out = not one.poll()
        _end(running)
    return [one.finish() for one in running]


def _all_ended(running: Sequence[_Running]) -> bool:
    return sum(one.poll() for one in running) == len(running)  # asks each, so that each end is timed


def _end(running: Sequence[_Running]) -> None:
    """End what still runs: torchrun politely, so that it ends its workers, then everything by force."""
    for one in running:
        one.signal_group(one.job.stop_signal)
    deadline = time.monotonic() + _TERM_GRACE_SECONDS
    while not _all_ended(running) and time.monotonic() < deadline:
        time.sleep(0.02)
    for one in running:
        one.signal_group(signal.SIGKILL)
    for one in running:
        one.process.wait(timeout=10)
        one.poll()


def check_ranks(completed: Sequence[CompletedRank], argv: Sequence[str] = ()) -> None:
    """Raise an error that names the first failed rank, shows the end of its stderr and lists the other failures."""
    failures = [one for one in completed if one.returncode != 0]
    if not failures:
        return
    first = next((one for one in failures if not one.timed_out), failures[0])
    others = [str(one.rank) for one in failures if one is not first]
    how = "did not finish in time" if first.timed_out else f"ended with {first.returncode}"
    tail = "\n".join(first.stderr.splitlines()[-_STDERR_TAIL_LINES:])
    raise CommunicationError(
        f"rank {first.rank} on host {first.host} {how}"
        + (f" running '{shlex.join(argv)}'" if argv else "")
        + (f"; so did ranks {', '.join(others)}" if others else "")
        + (f"; the end of its stderr:\n{tail}" if tail else "")
    )


def port_of_run(number: int) -> int:
    """A port for the store of the laboratory's n-th run; its own each time, so that late packets meet nobody."""
    return _FIRST_PORT + number % 10_000
