"""Runs for the benchmarks of faults: started, watched, and cleared away.

A run is quick: generated images, a small network, steps of some 10 ms.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.small_run import SMALL_RUN

WORKERS, STEPS, HANG_SECONDS = 4, 200, 3.0
SETTINGS = (
    *SMALL_RUN,
    "train.epochs=1000",
    "train.evaluate_every_epochs=3",
    "train.threads_per_worker=1",
    "checkpoint.every_epochs=0",
    "checkpoint.every_steps=7",
    "comm.max_restarts=100",
    "comm.wait_seconds=120",
    f"comm.hang_seconds={HANG_SECONDS}",
    "log.to=[]",
)
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "sgd": (),
    "lars": ("optimizer.name=lars", "optimizer.nesterov=false", "optimizer.lars.trust_coefficient=0.02"),
}
PATIENCE_SECONDS = 900.0  # on a machine with ten times the work it can do, a start takes minutes
END_SECONDS = 60.0  # for a process that has nothing left to do
_DISK_BYTES = 64 * 2**20


class Disturbed:
    """One run and what is done to it. settings: of the recipe, beside SETTINGS."""

    def __init__(self, scratch: Path, steps: int, settings: Sequence[str] = ()) -> None:
        self.folder, self.temporary, self.steps = scratch / "run", scratch / "tmp", steps
        self.settings = tuple(settings)
        self.has_small_disk = False
        self.temporary.mkdir(parents=True)
        self.told = (scratch / "told").open("ab")
        self.environment = {**os.environ, "TMPDIR": str(self.temporary), "MEGABATCH_TOKEN": secrets.token_hex(32)}
        self.launchers: list[psutil.Popen] = []
        self.guests: list[psutil.Popen] = []
        self.family: set[psutil.Process] = set()  # all that were ever seen
        self.founders: set[int] = set()
        self.noted = 0  # changes of membership that earlier starts of the run noted

    def start(self, *, resume: bool = False) -> None:
        words = [*command(self.folder, self.steps, self.settings), "--workers", str(WORKERS), "--elastic"]
        self.launchers.append(self.open([*words, *["--resume"] * resume]))
        self.founders, self.noted = set(), len(self.changes())

    def open(self, words: list[str]) -> psutil.Popen:
        return psutil.Popen(words, env=self.environment, stdout=self.told, stderr=self.told)

    @contextlib.contextmanager
    def on_small_disk(self) -> Iterator[None]:
        """Let the run folder be a file system of its own while the block lasts, where root may mount one."""
        self.folder.mkdir(parents=True)
        words = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "chaos", str(self.folder)]
        mounted = subprocess.run(words, check=False, timeout=30, capture_output=True)
        self.has_small_disk = mounted.returncode == 0  # not in every container
        try:
            yield
        finally:
            if self.has_small_disk:
                subprocess.run(["umount", "--lazy", str(self.folder)], check=True, timeout=30)

    @contextlib.contextmanager
    def full_disk(self, free_bytes: int) -> Iterator[None]:
        """Fill the small disk but for so many bytes while the block lasts."""
        ballast = self.folder / ".ballast"
        with ballast.open("wb", buffering=0) as file:
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(2**16))
            file.truncate(max(0, file.tell() - free_bytes))
        yield
        ballast.unlink()

    def processes(self) -> list[psutil.Process]:
        """The workers that live, of all launchers."""
        found: list[psutil.Process] = []
        for launcher in [*self.launchers, *self.guests]:
            with contextlib.suppress(psutil.Error):
                self.family.update(launcher.children(recursive=True))
        for process in self.family:
            with contextlib.suppress(psutil.Error):
                is_worker = "spawn_main" in " ".join(process.cmdline())
                if is_worker and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                    found.append(process)
        return found

    def members(self) -> list[psutil.Process]:
        """The workers that take part, by what the run itself has noted."""
        pids = set(self.founders)
        for change in self.changes()[self.noted :]:
            pids -= {pid_of(name) for name in change["lost"]}
            pids |= {pid_of(name) for name in change["joined"]}
        return [process for process in self.processes() if process.pid in pids]

    def main_rank(self) -> psutil.Process | None:
        """The worker that has the metrics open."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error, OSError):
                if any(file.path.endswith("metrics.jsonl") for file in process.open_files()):
                    return process
        return None

    def rows(self) -> list[bytes]:
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().split(b"\n")[:-1] if path.exists() else []

    def changes(self) -> list[dict[str, Any]]:
        path = self.folder / "membership.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):  # half a line, from a disk that was full
                found.append(json.loads(line))
        return found

    def is_over(self) -> bool:
        return all(launcher.poll() is not None for launcher in self.launchers)

    def wait(self, met: Callable[[], bool], seconds: float = PATIENCE_SECONDS, pause: float = 0.005) -> bool:
        """Wait for something; False when the run is over before."""
        deadline = time.monotonic() + seconds
        while not met():
            if self.is_over():
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {seconds:g} s at step {len(self.rows())}")
            time.sleep(pause)
        return True

    def wait_for_step(self, step: int) -> bool:
        """Wait for a step of this start of the run."""
        reached = self.wait(lambda: len(self.rows()) >= step and self.main_rank() is not None)
        if reached and not self.founders:
            self.founders = {process.pid for process in self.processes()}
        return reached

    def add_guest(self) -> None:
        """Start one more worker by a command of its own, which knows address and token."""
        listening = [one for one in self.launchers[-1].net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        [port] = [one.laddr.port for one in listening if _is_door(one.laddr.port)]
        words = [*command(self.folder, self.steps, self.settings), "--workers", "1", "--elastic", f"127.0.0.1:{port}"]
        self.guests.append(self.open(words))

    def end(self) -> list[psutil.Process]:
        """Free everything; returns the processes that were still there without need."""
        self.processes()
        psutil.wait_procs(self.guests, timeout=END_SECONDS)  # one that came late has yet to find out that all is over
        left = [p for p in self.family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        left = [p for p in psutil.wait_procs(left, timeout=END_SECONDS)[1] if isinstance(p, psutil.Process)]
        for process in [*left, *self.launchers, *self.guests]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        for launcher in [*self.launchers, *self.guests]:
            launcher.wait(timeout=20)
        self.told.close()
        return left


def command(folder: Path, steps: int, settings: Sequence[str] = ()) -> list[str]:
    words = [word for one in (*SETTINGS, *settings, f"train.max_steps={steps}") for word in ("--set", one)]
    return [sys.executable, "-m", "megabatch", "train", "demo", "--output", str(folder), *words]


def _is_door(port: int) -> bool:
    """Whether the door of a lighthouse listens there, and not the lighthouse itself."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
        return connection.recv(100).startswith(b"megabatch")
    return False


def pid_of(name: str) -> int:
    return int(name.rsplit("-", 2)[1])


def weights_of(folder: Path) -> str:
    path = folder / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def undisturbed(scratch: Path, steps: int, optimizer: str = "sgd") -> str:
    folder = scratch / f"undisturbed-{optimizer}"
    if not (folder / "model.safetensors").exists():
        words = [*command(folder, steps, OPTIMIZERS[optimizer]), "--workers", "1"]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return weights_of(folder)
