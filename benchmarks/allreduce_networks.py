"""All-reduce algorithms on emulated networks: real Gloo and TCP between hosts that are network namespaces.

    sudo .venv/bin/python -m benchmarks.allreduce_networks [--quick] [--predict] [--json FILE]

16 ranks in a 4x4 grid on three networks of `netlab`, and 4 ranks in a 2x2 grid on plain loopback. In each iteration
all algorithms reduce the same message one after another, in an order drawn anew; an iteration lasts from a start
that the ranks agree on off the network until the slowest rank is done. Before it counts, every algorithm's result is
compared with the exact sum on every rank. How the ratios are formed is said in `allreduce_table`.

The same algorithm twice (`--algorithms torus,torus@262144`, the default segment) shows how far noise alone takes a
ratio on the machine at hand.

The default run takes about a quarter of an hour on two cores and wants the machine for itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.allreduce_rank import CellPlan, RankReport, run_cells
from benchmarks.allreduce_table import CellResult, Timing, predicted_seconds, prediction_lines, result_lines
from benchmarks.gate import local_ranks, make_gate_file
from benchmarks.netlab import NETWORKS, laboratory
from megabatch.errors import MegabatchError

__all__ = ["main", "planned_cells"]

LOOPBACK = "loopback"
GRIDS = {**dict.fromkeys(NETWORKS, "4x4"), LOOPBACK: "2x2"}
SIZES_BYTES = (100_000, 1_000_000, 10_000_000, 100_000_000)  # the last: gradients of ResNet-50 in float32
ITERATIONS = {100_000: 30, 1_000_000: 15, 10_000_000: 6, 100_000_000: 2}
HUGE_BYTES = 100_000_000
HUGE_NETWORKS = ("shared-nic", "nic-per-rank")

ALGORITHMS = (
    "backend",
    "ring",
    "torus",
    "two_way_torus",
    "direct",
    "hierarchical",
    "halving_doubling",
    "exchange",
    "auto",
)
UNFIT_FROM_BYTES = {"exchange": 5_000_000, "two_way_torus": 50_000_000, "halving_doubling": 50_000_000}
"""Algorithms for which larger messages take long and prove nothing: they send several times the bytes."""

_TIMEOUT_SECONDS = 1500.0


def planned_cells(
    network: str, sizes: Sequence[int] | None, iterations: int | None, algorithms: Sequence[str]
) -> tuple[CellPlan, ...]:
    """The cells of one network; sizes and iterations not given are the defaults."""
    fit = [size for size in SIZES_BYTES if size < HUGE_BYTES or network in HUGE_NETWORKS]
    cells = []
    for size in sizes or fit:
        nearest = max([known for known in SIZES_BYTES if known <= size], default=SIZES_BYTES[0])
        names = tuple(name for name in algorithms if size < UNFIT_FROM_BYTES.get(name.partition("@")[0], size + 1))
        cells.append(CellPlan(size, iterations or ITERATIONS[nearest], names))
    return tuple(cells)


def measure_network(name: str, cells: tuple[CellPlan, ...]) -> tuple[list[CellResult], dict[str, Any]]:
    """Run all cells of one network; also return what the machine and the emulator say about the run."""
    grid = GRIDS[name]
    network = NETWORKS.get(name)
    world_size = network.world_size if network else 4
    with (
        tempfile.TemporaryDirectory(prefix="gate-") as folder,
        laboratory(network) if network else nullcontext() as lab,
    ):
        gate_file = Path(folder) / "gate"
        make_gate_file(gate_file, world_size)
        launch = lab.fork_ranks if lab else partial(local_ranks, world_size)
        start = time.monotonic()
        reports: list[RankReport] = launch(run_cells, grid, cells, gate_file, timeout_seconds=_TIMEOUT_SECONDS)
        conditions = {
            "network": name,
            "description": network.describe() if network else f"{world_size} ranks on loopback",
            "grid": grid,
            "seconds": time.monotonic() - start,
            "load_average_after": os.getloadavg()[0],
            "emulator": lab.links.health() if lab else None,
        }
    wrong = [text for report in reports for text in report.wrong]
    if wrong:
        raise SystemExit(f"{name}: wrong sums, nothing is reported: {'; '.join(wrong[:5])}")
    calibration = reports[0].calibration
    assert calibration is not None
    conditions["links"] = [asdict(axis) for axis in calibration.axes]
    results = []
    for index, cell in enumerate(cells):
        timings = {text: Timing.of([report.seconds[index][text] for report in reports]) for text in cell.algorithms}
        prices = predicted_seconds(cell.algorithms, grid, cell.message_bytes, calibration, network)
        choice = reports[0].choices.get(cell.message_bytes, "")
        results.append(CellResult(name, cell.message_bytes, timings, choice, prices))
    return results, conditions


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, measure, print."""
    options = _parser().parse_args(argv)
    sizes = [int(float(size)) for size in options.sizes.split(",")] if options.sizes else None
    iterations = options.iterations
    if options.quick:
        sizes, iterations = sizes or [100_000, 1_000_000], iterations or 3
    results: list[CellResult] = []
    conditions = []
    for name in options.networks.split(","):
        if name not in GRIDS:
            raise SystemExit(f"no network is called '{name}'; choose of {', '.join(GRIDS)}")
        cells = planned_cells(name, sizes, iterations, options.algorithms.split(","))
        print(f"{name}: {len(cells)} sizes ...", file=sys.stderr, flush=True)
        try:
            measured, condition = measure_network(name, cells)
        except MegabatchError as error:
            raise SystemExit(f"{name}: {error}") from None
        results += measured
        conditions.append(condition)
    for condition in conditions:
        links = "; ".join(_link_text(axis) for axis in condition["links"])
        print(
            f"{condition['network']}: {condition['description']}, {condition['seconds']:.0f} s, load average ", end=""
        )
        print(f"{condition['load_average_after']:.1f}; as measured: {links}")
    print("", *result_lines(results), sep="\n")
    if options.predict:
        print("", *prediction_lines(results), sep="\n")
    if options.json:
        machine = {"cores": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()}
        content = {"machine": machine, "runs": conditions, "cells": [result.as_json() for result in results]}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _link_text(axis: dict[str, Any]) -> str:
    rate = axis["bytes_per_second"] * 8 / 1e6
    shared = f" shared by {axis['ranks_per_link']:.1f}" if axis["ranks_per_link"] > 1.1 else ""
    return f"{axis['name']} {1e3 * axis['latency_seconds']:.2f} ms, {rate:.0f} Mbit/s{shared}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(GRIDS), help="of " + ", ".join(GRIDS))
    parser.add_argument("--sizes", default="", help="bytes, such as 1e5,1e6; default: all that fit the network")
    parser.add_argument("--iterations", type=int, default=None, help="per algorithm; default: fewer for larger sizes")
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS), help="may carry segment bytes: torus@65536")
    parser.add_argument("--quick", action="store_true", help="two sizes, three iterations: shows that it works")
    parser.add_argument("--predict", action="store_true", help="print prices and their errors beside the medians")
    parser.add_argument("--json", type=Path, default=None, help="write everything to this file")
    return parser


if __name__ == "__main__":
    main()
