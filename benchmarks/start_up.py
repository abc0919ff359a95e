"""How long a person waits for `megabatch --help`, and whether torch stays out where it is not needed.

    python -m benchmarks.start_up [--runs 15]

The peer is `python -c pass` in the same interleaved run: what the interpreter alone takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

TARGET_SECONDS = 0.5
TORCH_FREE = ("megabatch", "megabatch.cli", "megabatch.recipes", "megabatch.report.run", "megabatch.comm.phases")


def seconds(words: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, timeout=60)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    times: dict[str, list[float]] = {"--help": [], "recipes": [], "python -c pass": []}
    for _ in range(options.runs):
        times["--help"].append(seconds([sys.executable, "-m", "megabatch", "--help"]))
        times["recipes"].append(seconds([sys.executable, "-m", "megabatch", "recipes"]))
        times["python -c pass"].append(seconds([sys.executable, "-c", "pass"]))
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
        print(f"{name:<16} median {statistics.median(values):.3f} s {spread}")
    print(f"at most {TARGET_SECONDS} s wanted for --help")
    for name, free in clean.items():
        print(f"import {name:<26} {'without torch' if free else 'LOADS TORCH'}")


if __name__ == "__main__":
    main()
