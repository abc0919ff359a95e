"""What the planner's numbers are worth: against SimGrid, its own simulation, papers, emulated networks; its speed.

    python -m benchmarks.planner [--json]

Rows of MLPerf are a command of their own: `megabatch plan --validate rows.csv`. Imports no torch.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.simulators.simgrid import find_simgrid, play, play_of
from benchmarks.simulators.simulate import lock_step_seconds, rounds_of, simulate_all_reduce
from megabatch.comm.calibration import AxisCost, Calibration
from megabatch.comm.phases import Phase, RoundGroup, phases
from megabatch.comm.price import all_reduce_seconds
from megabatch.comm.shape import parse_grid
from megabatch.plan.cluster_file import load_cluster
from megabatch.plan.convergence import mlperf_law
from megabatch.plan.estimate import Estimator
from megabatch.plan.network import Network, price_curve, price_swaps
from megabatch.plan.request import PlanRequest, run
from megabatch.plan.search import Goal, plan
from megabatch.plan.workload import workload_of
from megabatch.schedule.batch import parse_stages

__all__ = [
    *("emulated_errors", "live_errors", "paper_rows", "simgrid_errors", "simulation_errors", "speeds"),
    "system_errors",
]

ROOT = Path(__file__).parents[1]
SIZE = 51.12e6
# The platform of benchmarks/simulators/simgrid.csv; see tests/plan/test_network.py.
PLATFORM = Network(4, 34, 50e9, 1e-6, 23e9, 1.5e-6, 0.0, "ring", 34 * 25e9 / 3, 1e-6)
PLAYED = (
    *(("ring", "16"), ("ring", "64"), ("torus", "8x8"), ("torus", "16x16"), ("torus", "5x12"), ("torus", "2x3x4")),
    *(("hierarchical", "64x4"), ("hierarchical", "12x8"), ("halving_doubling", "64"), ("direct", "4x8")),
)
# Beyond one rack, uneven, and odd; then those that ranks do not run in step.
LARGE = (
    *(("ring", "4096"), ("torus", "54x64"), ("torus", "17x16"), ("torus", "13x11"), ("hierarchical", "256x4")),
    *(("halving_doubling", "1024"), ("halving_doubling", "32"), ("exchange", "3x5"), ("direct", "12x16")),
)
FREE = (
    *(("torus", "8x8"), ("torus", "2x3x4"), ("hierarchical", "6x16"), ("two_way_torus", "4x8")),
    *(("halving_doubling", "30"), ("exchange", "4x4"), ("ring", "64"), ("torus", "10x20")),
)
SYSTEMS = (
    ("64 A100, MLPerf 2.0", "dgx-a100", 64, 51, 19.56),
    ("64 H100, MLPerf 3.0", "dgx-h100", 64, 50, 10.86),
    ("512 H100, MLPerf 3.0", "dgx-h100", 512, 40, 9.15),
    ("768 H100, MLPerf 3.0", "dgx-h100", 768, 42, 9.46),
    ("2528 H100, MLPerf 4.0", "dgx-h100", 2528, 16, 5.86),
    ("3584 H100, MLPerf 3.0", "dgx-h100", 3584, 16, 5.77),
)
"""Name, cluster, workers, local batch, measured milliseconds (benchmarks.mlperf_rows): NVIDIA's and CoreWeave's."""
_SIZES = {"100 KB": 1e5, "1 MB": 1e6, "10 MB": 1e7}


def simgrid_errors() -> list[tuple[str, float]]:
    """Closed form over SimGrid's stored time, minus 1, cell by cell."""
    found = []
    for cell in csv.DictReader((ROOT / "benchmarks/simulators/simgrid.csv").read_text(encoding="utf-8").splitlines()):
        name, grid = cell["algorithm"], cell["grid"]
        if name == "nearest_first":
            steps = Phase("all_reduce", "halving", -1, int(grid)).steps()
            nearest = [RoundGroup(1, step.share, distance=int(grid) // 2 // step.distance) for step in steps]
            seconds = price_swaps(PLATFORM, int(grid), nearest).seconds(SIZE)
        else:
            seconds = price_curve(PLATFORM, name, parse_grid(grid), 4).at(SIZE).seconds
        found.append((f"{name} {grid}", 1e3 * seconds / float(cell["milliseconds"]) - 1))
    return found


def simulation_errors() -> list[tuple[str, float]]:
    """The simulation in lock-step over the closed form, minus 1."""
    found = []
    for name, grid in PLAYED:
        shape = parse_grid(grid)
        (channel,) = rounds_of(phases(name, shape), shape, 4)
        played = lock_step_seconds(PLATFORM, channel, shape.world_size, SIZE)
        found.append((f"{name} {grid}", played / price_curve(PLATFORM, name, shape, 4).at(SIZE).seconds - 1))
    return found


def live_errors() -> dict[str, list[tuple[str, float]]]:
    """The closed form and the free simulation over SimGrid as it runs here, minus 1; nothing without SimGrid."""
    if find_simgrid() is None:
        return {}
    cells = [(name, parse_grid(grid)) for name, grid in (*PLAYED, *LARGE)]
    free = [(name, parse_grid(grid)) for name, grid in FREE]
    plays = [play_of(name, shape, SIZE, 4) for name, shape in cells]
    answer = play(PLATFORM, plays + [play_of(name, shape, SIZE, free=True) for name, shape in free])
    closed = [price_curve(PLATFORM, name, shape, 4).at(SIZE).seconds for name, shape in cells]
    played = [simulate_all_reduce(PLATFORM, name, shape, SIZE) for name, shape in free]
    errors = [
        (f"{name} {shape.text}", ours / theirs - 1)
        for (name, shape), ours, theirs in zip(cells + free, closed + played, answer.seconds, strict=True)
    ]
    return {
        f"closed form against SimGrid {answer.version}, live": errors[: len(cells)],
        f"free simulation against SimGrid {answer.version}, live": errors[len(cells) :],
    }


def paper_rows() -> list[dict[str, Any]]:
    """Quoted training times (seconds) and throughputs (images/s) beside predictions."""
    half, knl = ("train.ghost_batch_size=32",), ("train.ghost_batch_size=16", "comm.grad_dtype=fp32", "train.epochs=90")
    torus, cpu = ("torus",), ("halving_doubling",)
    asked = (
        ("Mikami v2, 3456 V100, 54K", 122.0, "training", ("mikami2018_54k", "abci", 3456, torus, "48x72", None, ())),
        ("Mikami v1, 2176 V100, 34K-68K", 224.0, "training", ("mikami2018", "abci", 2176, torus, "34x64", None, ())),
        ("Mikami, 1024 V100, 32 a GPU", 556_522.0, "rate", ("mikami2018", "abci", 1024, torus, "32x32", 32768, half)),
        ("Mikami, 2048 V100, 32 a GPU", 1_091_357.0, "rate", ("mikami2018", "abci", 2048, torus, "32x64", 65536, half)),
        (
            "Mikami, 3456 V100, 32 a GPU",
            1_641_853.0,
            "rate",
            ("mikami2018", "abci", 3456, torus, "48x72", 110592, half),
        ),
        ("Akiba, 1024 P100, 32K", 896.6, "training", ("akiba2017", "mn1", 1024, ("ring",), None, 32768, ())),
        (
            "Codreanu, 448 Skylake, collapse",
            3720.0,
            "training",
            ("codreanu2017", "stampede2", 896, cpu, None, None, ()),
        ),
        (
            "Codreanu, 720 Xeon Phi, 11.5K",
            3720.0,
            "training",
            ("goyal2017", "stampede2-knl", 720, cpu, None, 11520, knl),
        ),
        (
            "Codreanu, 1536 Xeon Phi, 24K?",
            1680.0,
            "training",
            ("goyal2017", "stampede2-knl", 1536, cpu, None, 24576, knl),
        ),
    )
    # 448 Skylake: 60 min for 8,040 steps and 5 min for a collapse of 402; the recipe makes 7,638 and the collapse.
    rows = []
    for name, quoted, what, (recipe, cluster, workers, algorithms, grid, batch, settings) in asked:
        result = run(
            PlanRequest(
                recipe,
                cluster,
                str(workers),
                algorithms=algorithms,
                grid=grid,
                batches=(str(batch),) if batch else (),
                overrides=settings,
                # Akiba's version sent the whole gradient after the backward pass.
                bucket_mb=200.0 if recipe == "akiba2017" else None,
            )
        ).result
        said = result.chosen.training if what == "training" else result.chosen.images_per_second
        rows.append(
            {
                "row": name,
                "what": "s" if what == "training" else "images/s",
                "quoted": quoted,
                "predicted": said.middle,
                "low": said.low,
                "high": said.high,
                "error": said.middle / quoted - 1,
                "step_ms": {part: 1e3 * seconds for part, seconds in result.chosen.step_time.parts.items()},
            }
        )
    return rows


def system_errors() -> list[tuple[str, float]]:
    """Steps of MLPerf systems by their cluster file alone, which knows one node, over the measured step, minus 1."""
    found = []
    for name, cluster, workers, local_batch, measured_ms in SYSTEMS:
        batch = str(workers * local_batch)
        settings = (f"train.global_batch_size={batch}", f"train.ghost_batch_size={local_batch}", "comm.grad_dtype=fp16")
        asked = PlanRequest("mlperf_3264", cluster, str(workers), algorithms=("backend",), overrides=settings)
        found.append((name, 1e3 * run(asked).result.chosen.step.middle / measured_ms - 1))
    return found


def emulated_errors(page: str) -> list[tuple[str, float]]:
    """Prices by measured links over the measured medians of docs/results/allreduce.md, minus 1; our own algorithms.

    Each run is priced by the links measured at its start; loopback is left out: no network, cores decide there.
    """
    links = {
        name: _links(text) for name, text in re.findall(r"^- ([\w-]+) ?[(:](.*?)(?=\n- |\n\n|\Z)", page, re.M | re.S)
    }
    found = []
    for network, size, algorithm, cells in re.findall(
        r"^\| ([\w-]+) \| (100 KB|1 MB|10 MB) \| (\w+) \| ([\d.]+ \[.*?) \|$", page, re.MULTILINE
    ):
        if network == "loopback" or algorithm in ("auto", "backend"):
            continue
        medians = [float(text) for text in re.findall(r"([\d.]+) \[", cells)]
        for number, (median, calibration) in enumerate(zip(medians, links.get(network, ()), strict=False), start=1):
            shape, message = calibration.shape, _SIZES[size]
            phase_list = calibration.phases(algorithm, shape, message)
            seconds = all_reduce_seconds(phase_list, shape, calibration.links(shape), message)
            found.append((f"{network} {size} {algorithm}, run {number}", 1e3 * seconds / median - 1))
    return found


def _links(text: str) -> list[Calibration]:
    """The links of each run, "column 2.86 ms, 197 Mbit/s shared by 3.8; row 0.96 ms, 772 Mbit/s / column ..."."""
    axis = r" ([\d.]+) ms, (\d+) Mbit/s(?: shared by ([\d.]+))?"
    found = []
    for numbers in re.findall(rf"column{axis}; row{axis}", " ".join(text.split())):
        latency, rate, share, row_latency, row_rate, row_share = (float(number or 1) for number in numbers)
        column = AxisCost(latency / 1e3, rate * 1e6 / 8, 0.0, share, name="column", size=4)
        row = AxisCost(row_latency / 1e3, row_rate * 1e6 / 8, 0.0, row_share, name="row", size=4)
        found.append(Calibration("4x4", 4, "gloo", (column, row)))
    return found


def speeds() -> dict[str, float]:
    """Seconds to search: 4096 workers, a million, everything from one node to 4096, the same with batches."""
    cluster, found = load_cluster("dgx-a100"), {}
    for name, workers, batch in (
        ("4096", "4096", 65536),
        ("a million", "1000000", 4_000_000),
        ("8..4096", None, 65536),
    ):
        load = workload_of("mikami2018", ["train.ghost_batch_size=4"]).with_batch(parse_stages(batch))
        began = time.perf_counter()
        result = plan(Estimator(cluster, load), cluster.worker_counts(workers), Goal())
        found[f"{name} workers, {result.num_considered} candidates"] = time.perf_counter() - began
    began = time.perf_counter()
    result = plan(Estimator(cluster, workload_of("mikami2018"), mlperf_law()), cluster.worker_counts(None), Goal())
    found[f"8..4096 workers, batches searched, {result.num_considered} candidates"] = time.perf_counter() - began
    return found


def _summary(errors: Sequence[tuple[str, float]]) -> str:
    sizes = [abs(error) for _, error in errors]
    worst = max(errors, key=lambda one: abs(one[1]))
    return f"n = {len(sizes)}, median {statistics.median(sizes):.3%}, largest {abs(worst[1]):.3%} ({worst[0]})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    page = (ROOT / "docs/results/allreduce.md").read_text(encoding="utf-8")
    errors = {
        "closed form against stored SimGrid 3.32": simgrid_errors(),
        "simulation in lock-step against the closed form": simulation_errors(),
        **live_errors(),
        "price by measured links against emulated networks": emulated_errors(page),
        "cluster files against MLPerf systems": system_errors(),
    }
    papers, times = paper_rows(), speeds()
    if options.json:
        print(json.dumps({"errors": errors, "papers": papers, "seconds": times}))
        return
    for name, found in errors.items():
        print(f"{name}: {_summary(found) if found else 'no table to compare with'}")
    for name, error in errors["cluster files against MLPerf systems"]:
        print(f"  {name:<24} {error:+.1%}")
    for row in papers:
        print(
            f"{row['row']:<32} quoted {row['quoted']:>11,.0f}  predicted {row['predicted']:>11,.0f} "
            f"[{row['low']:,.0f} {row['high']:,.0f}] {row['what']:<9} {row['error']:+.1%}"
        )
    for name, seconds in times.items():
        print(f"{name}: {seconds:.3f} s")


if __name__ == "__main__":
    main()
