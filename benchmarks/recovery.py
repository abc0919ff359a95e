"""How long does a killed worker cost? Seconds from kill -9 of one of 4 workers to the next finished step.

    python -m benchmarks.recovery [--rounds 10] [--json]

Three ways take turns: an elastic run; the restart of local workers from the last checkpoint (`--workers 4`, one
after each step); torchrun's restart of a bare DDP loop that saves its state after each step. All train the same small
network. A step counts when it is later than any step that was finished before the kill. What it costs the others when
a worker joins is what the elastic run notes in membership.jsonl, from the last step to the world with the new worker.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.disturbed import WORKERS, command

WAYS = ("elastic", "restart", "torchrun, bare DDP")
STEPS = 100_000  # the runs are ended from outside


def words_of(way: str, folder: Path) -> list[str]:
    every_step = ["--set", "checkpoint.every_steps=1"] if way == "restart" else []
    if way.startswith("torchrun"):
        launcher = ["--standalone", "--nproc-per-node", str(WORKERS), "--max-restarts", "3"]
        return [sys.executable, "-m", "torch.distributed.run", *launcher, __file__, "--bare", str(folder)]
    words = [*command(folder, STEPS), *every_step, "--workers", str(WORKERS)]
    return [*words, *["--elastic"] * (way == "elastic")]


def last_step(folder: Path) -> int:
    try:
        lines = (folder / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
        return int(json.loads(lines[-1])["step"]) if lines else 0
    except FileNotFoundError:
        return 0


def wait_for_step(folder: Path, step: int, seconds: float = 400.0) -> None:
    deadline = time.monotonic() + seconds
    while last_step(folder) < step:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no step {step} within {seconds:g} s")
        time.sleep(0.005)


def recover(way: str, folder: Path) -> dict[str, Any]:
    """Kill a worker of a new run; the seconds until the run goes on, and the cost of each join."""
    folder.mkdir(parents=True)
    run = folder / "run"
    with (folder / "told").open("wb") as told:
        launcher = psutil.Popen(words_of(way, run), stdout=told, stderr=told, start_new_session=True)
        try:
            wait_for_step(run, 15)
            mark = "--bare" if way.startswith("torchrun") else "spawn_main"
            workers = [one for one in launcher.children(recursive=True) if mark in " ".join(one.cmdline())]
            before = last_step(run)
            workers[-1].kill()
            began = time.monotonic()
            wait_for_step(run, before + 2)  # one may have been finished as the worker died
            seconds = time.monotonic() - began
            joins = []
            if way == "elastic":
                joins = wait_for_join(run)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait(timeout=30)
    return {"seconds": seconds, "joins": joins}


def wait_for_join(run: Path, seconds: float = 120.0) -> list[float]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        changes = [json.loads(line) for line in (run / "membership.jsonl").read_bytes().split(b"\n")[:-1]]
        if joins := [change["seconds"] for change in changes if change["joined"]]:
            return joins
        time.sleep(0.2)
    return []


def bare_loop(folder: Path) -> None:
    """A DDP loop as many write it: state saved after each step, loaded at the start."""
    import torch
    import torch.distributed as dist

    from megabatch.model.registry import build_model

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    network = build_model("resnet8", num_classes=10, in_channels=3, width=8)
    model = torch.nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    saved, step = folder / "state.pt", 0
    if saved.exists():
        state = torch.load(saved)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    folder.mkdir(exist_ok=True)
    while True:
        images, labels = torch.randn(10, 3, 12, 12), torch.randint(10, (10,))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        step += 1
        if dist.get_rank() == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, folder / "part")
            os.replace(folder / "part", saved)
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        bare_loop(options.bare)
    found: dict[str, list[float]] = {way: [] for way in (*WAYS, "a join, for the others")}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(options.rounds):
            for way in WAYS:
                result = recover(way, Path(scratch) / f"{number} {way}")
                found[way].append(result["seconds"])
                found["a join, for the others"] += result["joins"]
                if not options.json:
                    print(f"round {number + 1}, {way}: {result['seconds']:.2f} s", flush=True)
    if options.json:
        print(json.dumps(found))
        return
    for way, values in found.items():
        if values:
            spread = f"{min(values):.2f} to {max(values):.2f}, n={len(values)}"
            print(f"{way:24} median {statistics.median(values):6.2f} s, {spread}")


if __name__ == "__main__":
    main()
