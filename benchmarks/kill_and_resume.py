"""Is anything lost by kill -9? Runs killed at random moments, resumed, and compared with the run never interrupted.

    python -m benchmarks.kill_and_resume [--tries 20] [--workers 2] [--collapse]

Three ways of dying take turns: the launcher and all workers at a random moment; the same while a checkpoint is being
written (its unfinished file is seen on disk); one worker alone, which the elastic launcher must survive by itself.
A try counts when the final `model.safetensors` and the losses in `metrics.jsonl` equal the uninterrupted run's bit for
bit. With `--collapse` the run has two branches, and their members must be equal too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

SETTINGS = [
    "data.source=generated",
    "data.image_size=16",
    "data.generated.num_train=3000",
    "data.generated.num_val=203",
    "model.width=48",
    "train.global_batch_size=0:96 0.4:192",
    "train.ghost_batch_size=32",
    "train.epochs=1.2",
    "train.evaluate_every_epochs=0.5",
    "checkpoint.every_steps=2",
    "optimizer.lr=0.05",
]


# Branches of four steps, early enough that kills fall before, into and between them.
COLLAPSE = ["collapse.at_epochs=[0.1, 0.25]", "collapse.epochs=0.128", "collapse.weight_decay=1e-3"]


def command(folder: Path, workers: int, resume: bool) -> list[str]:
    words = [sys.executable, "-m", "megabatch", "train", "demo", "--workers", str(workers), "--output", str(folder)]
    words += [word for setting in SETTINGS for word in ("--set", setting)]
    return words + ["--resume"] * resume


def run_to_end(folder: Path, workers: int, resume: bool) -> None:
    subprocess.run(command(folder, workers, resume), check=True, stdout=subprocess.DEVNULL, timeout=300)


def checkpoints_of(folder: Path) -> list[Path]:
    return list((folder / "checkpoints").glob("step-*.pt")) if (folder / "checkpoints").is_dir() else []


def being_written(folder: Path) -> bool:
    try:
        return any(
            name.endswith(".pt.part") or ".pt." in name for name in os.listdir(folder / "checkpoints") if name[0] == "."
        )
    except FileNotFoundError:
        return False


def kill_once(folder: Path, workers: int, way: str, chance: random.Random) -> str:
    """Start a run, kill it the given way, and return what happened."""
    process = subprocess.Popen(
        command(folder, workers, resume=False), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for = chance.randint(1, 4)
    extra_seconds = chance.uniform(0.0, 0.5)
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None and len(checkpoints_of(folder)) < min(wait_for, 3):
        time.sleep(0.002)
    if way == "while writing":
        while time.monotonic() < deadline and process.poll() is None and not being_written(folder):
            pass
    else:
        time.sleep(extra_seconds)
    if process.poll() is not None:
        return "ended before it could be killed"
    family = psutil.Process(process.pid).children(recursive=True)
    if way == "one worker":
        chance.choice(family).send_signal(signal.SIGKILL)
        process.wait(timeout=300)
        return f"worker killed, launcher ended with {process.returncode}"
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=30)
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive, f"{len(alive)} workers outlived their launcher"
    parts = being_written(folder)
    state = f"all killed in phase {phase_of(folder)}, {len(checkpoints_of(folder))} checkpoints on disk"
    return state + (", one half-written" if parts else "")


def phase_of(folder: Path) -> str:
    """The phase of the last step that was logged."""
    lines = (folder / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
    return str(json.loads(lines[-1])["phase"]) if lines else "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--collapse", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    SETTINGS.extend(COLLAPSE if options.collapse else [])
    good = 0
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "whole"
        run_to_end(whole, options.workers, resume=False)
        wanted = result_of(whole)
        for number in range(options.tries):
            way = ("any moment", "while writing", "one worker")[number % 3]
            folder = Path(scratch) / f"try-{number}"
            event = kill_once(folder, options.workers, way, chance)
            if not (folder / "summary.json").exists():
                run_to_end(folder, options.workers, resume=True)
            same = result_of(folder) == wanted
            good += same
            if not options.json:
                print(f"try {number + 1}, {way}: {event}; {'identical' if same else 'DIFFERENT'}", flush=True)
    if options.json:
        print(json.dumps({"identical": good, "tries": options.tries, "workers": options.workers}))
    else:
        print(f"{good} of {options.tries} resumed runs are bit-identical to the uninterrupted one")
    sys.exit(0 if good == options.tries else 1)


def result_of(folder: Path) -> tuple[list[bytes], list[tuple[int, float, float]]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    models = [folder / "model.safetensors", *sorted(folder.glob("members/*"))]
    return [path.read_bytes() for path in models], [(row["step"], row["loss"], row["top1"]) for row in rows]


if __name__ == "__main__":
    main()
