"""A host is cut off from eleven others, and comes back: does the run notice, go on, and end with the same bits?

    sudo .venv/bin/python -m benchmarks.elastic_hosts [--hosts 12] [--steps 200] [--json]

The network laboratory (`benchmarks.netlab`) holds the hosts, each with one elastic worker; the first also serves the
lighthouse. When all take part, the cable of the last host is pulled: packets vanish, nobody is told. It is plugged in
again when the others have left it behind and made more steps. Printed are the seconds from the cut to the next step,
the seconds from the plug to the step with all hosts, and whether the weights are those of one undisturbed worker.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.disturbed import HANG_SECONDS, command, undisturbed, weights_of
from benchmarks.netlab import Network, laboratory
from benchmarks.netlab.laboratory import Laboratory
from benchmarks.netlab.namespaces import inside

PORT = 29510
PATIENCE_SECONDS = 300.0
STEPS_WITHOUT = 10  # that the others make before the host comes back


def changes_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "membership.jsonl"
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def num_workers(folder: Path) -> int:
    changes = changes_of(folder)
    return int(changes[-1]["workers"]) if changes else 1


def num_rows(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait(met: Callable[[], bool], what: str) -> float:
    """Wait for something; the seconds it took."""
    began = time.monotonic()
    while not met():
        if time.monotonic() - began > PATIENCE_SECONDS:
            raise TimeoutError(f"waited {PATIENCE_SECONDS:g} s for {what}")
        time.sleep(0.01)
    return time.monotonic() - began


@contextlib.contextmanager
def hosts_at_work(lab: Laboratory, folder: Path, steps: int, told: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A lighthouse on the first host and a command on every host; all are ended afterwards."""
    environment = {**os.environ, "MEGABATCH_TOKEN": secrets.token_hex(32), "GLOO_SOCKET_IFNAME": "nic0"}
    address = f"{lab.network.stations[0].address}:{PORT}"
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(told.open("ab"))

        def start(host: int, words: list[str]) -> subprocess.Popen[bytes]:
            with inside(lab.namespaces[host]):
                process = subprocess.Popen(words, env=environment, stdout=output, stderr=output)
            stack.callback(process.wait, 30)
            stack.callback(process.kill)
            return process

        start(0, [sys.executable, "-m", "megabatch", "lighthouse", "--bind", address])
        words = [*command(folder, steps), "--workers", "1", "--elastic", address]
        yield [start(host, words) for host in range(lab.network.hosts)]


def measure(num_hosts: int, steps: int, scratch: Path) -> dict[str, Any]:
    folder, wanted = scratch / "run", undisturbed(scratch, steps)
    network = Network(num_hosts, 1, rate_mbit_per_second=200, latency_ms_one_way=1)
    with laboratory(network) as lab, hosts_at_work(lab, folder, steps, scratch / "told") as processes:
        wait(lambda: num_workers(folder) == num_hosts, f"{num_hosts} hosts")
        joined_at = num_rows(folder)
        wait(lambda: num_rows(folder) >= joined_at + STEPS_WITHOUT, "steps of all hosts")
        lab.cut_host(num_hosts - 1)
        cut = time.monotonic()
        wait(lambda: num_workers(folder) == num_hosts - 1, "the others to go on")
        left_at = changes_of(folder)[-1]["step"]
        wait(lambda: num_rows(folder) > left_at, "the next step")
        to_next_step = time.monotonic() - cut
        wait(lambda: num_rows(folder) >= left_at + STEPS_WITHOUT, "steps without the host")
        lab.join_host(num_hosts - 1)
        to_come_back = wait(lambda: num_workers(folder) == num_hosts, "the host to come back")
        back_at = changes_of(folder)[-1]["step"]
        codes = [process.wait(timeout=PATIENCE_SECONDS) for process in processes]
    return {
        "hosts": num_hosts,
        "network": network.describe(),
        "hang_seconds": HANG_SECONDS,
        "steps": {"cut": left_at, "back": back_at, "all": num_rows(folder)},
        "seconds_to_next_step": to_next_step,
        "seconds_to_come_back": to_come_back,
        "lost": changes_of(folder)[-2]["lost"],
        "exit_codes": codes,
        "equal": weights_of(folder) == wanted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=12)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--keep", type=Path, help="a folder where the run stays, to look at")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = options.keep or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        found = measure(options.hosts, options.steps, scratch)
    if options.json:
        print(json.dumps(found))
    else:
        print(f"{found['network']}; comm.hang_seconds {HANG_SECONDS:g}")
        print(f"from the cut to the next step of the others  {found['seconds_to_next_step']:.2f} s")
        print(f"from the plug to the step with all hosts     {found['seconds_to_come_back']:.2f} s")
        print(f"weights {'equal' if found['equal'] else 'DIFFER from'} those of one undisturbed worker")
    sys.exit(0 if found["equal"] and not any(found["exit_codes"]) else 1)


if __name__ == "__main__":
    main()
