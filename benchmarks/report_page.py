"""The report of a long run: how large, how long to make, how soon on screen.

    python -m benchmarks.report_page [--rows 100000] [--runs 5]

A run folder of 100,000 rows is made up (the numbers in it mean nothing), `megabatch report` is timed as a command, its
bytes compared, and chromium opens the page from disk with an empty cache. First paint is what the browser itself
reports (Paint Timing); `drawn` is when the last figure stands.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.report.folders import make_run, row
from tests.system.browser import open_browser, open_page

MAX_BYTES, MAX_MAKE_SECONDS, MAX_PAINT_SECONDS = 1_500_000, 10.0, 2.0
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    made: list[float] = []
    paint: list[float] = []
    drawn: list[float] = []
    pages = set()
    with tempfile.TemporaryDirectory() as scratch:
        folder = long_run(Path(scratch) / "run", options.rows)
        for _ in range(options.runs):
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-m", "megabatch", "report", str(folder)], check=True, capture_output=True)
            made.append(time.perf_counter() - begin)
            pages.add((folder / "report.html").read_bytes())
        for _ in range(options.runs):
            with open_browser() as browser:
                begin = time.perf_counter()
                with open_page(browser, folder / "report.html") as watched:
                    drawn.append(time.perf_counter() - begin)
                    paint.append(float(watched.page.evaluate(PAINT)))
    size = len(next(iter(pages)))
    if options.json:
        result = {"rows": options.rows, "page_bytes": size, "equal_bytes": len(pages) == 1}
        print(json.dumps(result | {"make_seconds": made, "first_paint_seconds": paint, "drawn_seconds": drawn}))
        return
    print(f"rows           {options.rows:,}")
    equal = "equal" if len(pages) == 1 else "DIFFERENT"
    print(f"page           {size / 1e6:.2f} MB (at most {MAX_BYTES / 1e6:.1f}), bytes {equal} on repetition")
    print(f"made in        {spread(made)} (at most {MAX_MAKE_SECONDS:.0f})")
    print(f"first paint    {spread(paint)} (at most {MAX_PAINT_SECONDS:.0f})")
    print(f"all drawn      {spread(drawn)}")


if __name__ == "__main__":
    main()
