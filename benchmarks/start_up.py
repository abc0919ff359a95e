"""How long a person waits: for `megabatch --help`, and from `megabatch train` to the first word and the first step.

    python -m benchmarks.start_up [--runs 15] [--train-runs 3] [--before CHECKOUT]

The peer is `python -c pass` in the same interleaved run: what the interpreter alone takes. `--before` measures another
checkout of this project too, in turns with this one. The run is the demo on small generated images.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
TARGET_SECONDS = 0.5
FIRST_WORD_SECONDS = 2.0
TORCH_FREE = ("megabatch", "megabatch.cli", "megabatch.recipes", "megabatch.report.run", "megabatch.comm.phases")
SMALL = (
    *("data.source=generated", "data.generated.num_train=2048", "data.generated.num_val=64", "train.max_steps=1"),
    *("train.global_batch_size=256", "optimizer.lr_factor=0.5", "train.evaluate_every_epochs=0"),
)


def seconds(words: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, timeout=60)
    return time.perf_counter() - begin


def start_seconds(checkout: Path, workers: int) -> dict[str, float]:
    """From the start of the command to its first line and to its first step, and the processor seconds of it all."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "megabatch", "train", "demo", "--workers", str(workers)]
        words += ["--output", f"{folder}/run", *(word for one in SMALL for word in ("--set", one))]
        environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONUNBUFFERED": "1"}
        spent = _children_seconds()
        begin = time.perf_counter()
        run = subprocess.Popen(words, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True)
        assert run.stdout is not None
        first = step = 0.0
        for line in run.stdout:
            first = first or time.perf_counter() - begin
            if line.startswith("epoch "):
                step = step or time.perf_counter() - begin
        assert run.wait(600) == 0
    return {"Enter to first word": first, "Enter to first step": step, "processor": _children_seconds() - spent}


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--train-runs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--before", type=Path, help="another checkout of this project")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    times: dict[str, list[float]] = {}
    for _ in range(options.runs):
        times.setdefault("--help", []).append(seconds([sys.executable, "-m", "megabatch", "--help"]))
        times.setdefault("recipes", []).append(seconds([sys.executable, "-m", "megabatch", "recipes"]))
        times.setdefault("python -c pass", []).append(seconds([sys.executable, "-c", "pass"]))
    checkouts = {"": HERE} | ({"before: ": options.before} if options.before else {})
    for _ in range(options.train_runs):
        for name, checkout in checkouts.items():
            for what, value in start_seconds(checkout, options.workers).items():
                times.setdefault(f"{name}{what}", []).append(value)
    check = "import sys, importlib; importlib.import_module(sys.argv[1]); sys.exit('torch' in sys.modules)"
    clean = {
        name: subprocess.run([sys.executable, "-c", check, name], check=False, timeout=60).returncode == 0
        for name in TORCH_FREE
    }
    if options.json:
        medians = {name: statistics.median(values) for name, values in times.items()}
        print(json.dumps({"median_seconds": medians, "runs": options.runs, "torch_free": clean}))
        return
    for name, values in times.items():
        spread = f"[{min(values):.3f} - {max(values):.3f}], n = {len(values)}"
        print(f"{name:<20} median {statistics.median(values):.3f} s {spread}")
    print(f"at most {TARGET_SECONDS} s wanted for --help, {FIRST_WORD_SECONDS} s to the first word of a run")
    for name, free in clean.items():
        print(f"import {name:<26} {'without torch' if free else 'LOADS TORCH'}")


if __name__ == "__main__":
    main()
