"""A run on hosts of the network laboratory, for the benchmarks of faults: its network can be cut. Needs root."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.disturbed import END_SECONDS, WORKERS, Disturbed, command
from benchmarks.netlab import Network
from benchmarks.netlab.laboratory import Laboratory
from benchmarks.netlab.namespaces import Namespace, inside

HOSTS = 2  # with workers; one more serves the lighthouse
NETWORK = Network(HOSTS + 1, 1, rate_mbit_per_second=500, latency_ms_one_way=0.5)
_PORT = 29510


class DisturbedHosts(Disturbed):
    """The workers of a run are spread over `HOSTS` hosts, each with a launcher of its own."""

    def __init__(self, scratch: Path, steps: int, settings: Sequence[str], lab: Laboratory) -> None:
        super().__init__(scratch, steps, settings)
        self.lab = lab
        self.environment["GLOO_SOCKET_IFNAME"] = "nic0"
        self._address = f"{lab.network.stations[0].address}:{_PORT}"

    def start(self, *, resume: bool = False) -> None:
        """On every host; the hosts find the run that is there by themselves."""
        del resume
        self._lighthouse = self._open_inside(
            self.lab.namespaces[0], [sys.executable, "-m", "megabatch", "lighthouse", "--bind", self._address]
        )
        words = [*command(self.folder, self.steps, self.settings), "--workers", str(WORKERS // HOSTS)]
        for namespace in self.lab.namespaces[1:]:
            self.launchers.append(self._open_inside(namespace, [*words, "--elastic", self._address, "--resume"]))

    def wait_for_step(self, step: int) -> bool:
        """The first worker begins alone: the others take part when they come."""
        if not self.founders:
            if not self.wait(lambda: any(change["workers"] == WORKERS for change in self.changes())):
                return False
            self.founders, self.noted = {process.pid for process in self.processes()}, len(self.changes())
        return self.wait(lambda: len(self.rows()) >= step)

    def end(self) -> list[psutil.Process]:
        left = super().end()
        self._lighthouse.terminate()
        try:
            self._lighthouse.wait(timeout=END_SECONDS)
        except psutil.TimeoutExpired:
            left.append(self._lighthouse)
            self._lighthouse.kill()
        return left

    def _open_inside(self, namespace: Namespace, words: list[str]) -> psutil.Popen:
        with inside(namespace):
            return self.open(words)
