"""The report of a long run and of a run such as the demo: how large, how long to make, how soon on screen.

    python -m benchmarks.report_page [--rows 100000] [--runs 5] [--demo RUN]

Run folders of 100,000 rows and of the demo's 938 steps are made up (the numbers in them mean nothing; `--demo` takes
the folder of a real one), `megabatch report` is timed as a command, its bytes compared, and chromium opens the page
from disk with an empty cache. First paint is what the browser itself reports (Paint Timing); `drawn` is when the last
figure stands.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.report.folders import make_run, row
from tests.system.browser import open_browser, open_page

MAX_BYTES, MAX_MAKE_SECONDS, MAX_PAINT_SECONDS = 1_500_000, 10.0, 2.0
DEMO_STEPS = 938
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000"


def long_run(folder: Path, num_rows: int) -> Path:
    make_run(folder, num_steps=1)
    with open(folder / "metrics.jsonl", "w", encoding="utf-8") as file:
        for step in range(1, num_rows + 1):
            noise = math.sin(step * 12.9898) * 43758.5453 % 1.0
            file.write(json.dumps(row(step, 1000, loss=2.0 / (1 + step / 5000) + 0.1 * noise)) + "\n")
    return folder


def spread(values: list[float]) -> str:
    return f"median {statistics.median(values):.2f} s [{min(values):.2f} - {max(values):.2f}], n = {len(values)}"


@dataclass
class Timed:
    """A page: its different bytes, and seconds."""

    contents: set[bytes]
    make_seconds: list[float]
    first_paint_seconds: list[float]
    drawn_seconds: list[float]


def time_page(folder: Path, runs: int) -> Timed:
    timed, page = Timed(set(), [], [], []), folder / "report.html"
    for _ in range(runs):
        begin = time.perf_counter()
        words = [sys.executable, "-m", "megabatch", "report", str(folder), "--output", str(page)]
        subprocess.run(words, check=True, capture_output=True)
        timed.make_seconds.append(time.perf_counter() - begin)
        timed.contents.add(page.read_bytes())
    for _ in range(runs):
        with open_browser() as browser:
            begin = time.perf_counter()
            with open_page(browser, page) as watched:
                timed.drawn_seconds.append(time.perf_counter() - begin)
                timed.first_paint_seconds.append(float(watched.page.evaluate(PAINT)))
    return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--demo", type=Path, help="the folder of a real run in place of the made-up demo")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        demo = Path(scratch) / "demo"
        if options.demo:
            shutil.copytree(options.demo, demo, ignore=shutil.ignore_patterns("checkpoints", "*.safetensors"))
        else:
            make_run(demo, num_steps=DEMO_STEPS)
        for name, folder in (("demo", demo), (f"{options.rows:,} rows", long_run(Path(scratch) / "run", options.rows))):
            timed = time_page(folder, options.runs)
            size = len(next(iter(timed.contents)))
            equal = len(timed.contents) == 1
            if options.json:
                seconds = {key: value for key, value in vars(timed).items() if key != "contents"}
                result[name] = {"page_bytes": size, "equal_bytes": equal} | seconds
                continue
            told = "equal" if equal else "DIFFERENT"
            print(f"run            {name}")
            print(f"page           {size / 1e6:.2f} MB (at most {MAX_BYTES / 1e6:.1f}), bytes {told} on repetition")
            print(f"made in        {spread(timed.make_seconds)} (at most {MAX_MAKE_SECONDS:.0f})")
            print(f"first paint    {spread(timed.first_paint_seconds)} (at most {MAX_PAINT_SECONDS:.0f})")
            print(f"all drawn      {spread(timed.drawn_seconds)}")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
