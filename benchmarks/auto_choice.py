"""Does `auto` take the fastest all-reduce? The race of `megabatch bench allreduce` on local ranks, several times.

    python -m benchmarks.auto_choice [--runs 3] [--iterations 60] [--workers 4] [--grid 1x4] [--json FILE]

Sizes, turns and times are those of the tool: in every round all algorithms and `auto` reduce the same message in an
order drawn anew, and the slowest rank counts. Each run has new processes, in which `auto` measures anew. How `auto` is
held against the best, and the best against itself, is said in `allreduce_table`: the best is chosen on one half of the
rounds and compared on the other.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.allreduce_table import AUTO_TARGET, AutoShare, auto_against_best
from benchmarks.gate import local_ranks
from megabatch.bench.allreduce import BenchRequest, parse_size
from megabatch.text import bytes_text

_WARM_UP_ROUNDS = 2
_TIMEOUT_SECONDS = 1800.0

Seconds = dict[int, dict[str, list[float]]]  # of each round, by message bytes and algorithm


def measure(rank: int, shape: str, sizes: Sequence[int], iterations: int) -> tuple[Seconds, dict[int, str]]:
    """On every rank: seconds of each round, and what `auto` took for each size."""
    import torch
    import torch.distributed as dist

    from megabatch.comm.grid import ProcessGrid
    from megabatch.comm.measure import race
    from megabatch.comm.phases import ALGORITHMS
    from megabatch.comm.select import AutoReducer, make_reducer

    dist.init_process_group("gloo")
    grid = ProcessGrid.build(shape, timeout_seconds=120)
    auto = AutoReducer(grid)
    reducers = {name: make_reducer(grid, name) for name in ALGORITHMS} | {"auto": auto}
    found: Seconds = {}
    for size in sizes:
        buffer = torch.zeros(size // 4)
        runs = {name: partial(reducer.run, buffer) for name, reducer in reducers.items()}
        race(grid, runs, _WARM_UP_ROUNDS)
        found[size] = race(grid, runs, iterations)
    choices = {size: auto.choice_for(size).reason for size in sizes}
    for reducer in reducers.values():
        reducer.close()
    grid.close()
    dist.destroy_process_group()
    return found, choices


def lines_of(shares: Sequence[dict[int, AutoShare]], iterations: int) -> list[str]:
    """A row per run and size, and in how many of them `auto` reached what was wanted."""
    lines = ["| run | size | n | best | auto / best | best / itself |", "| --- | --- | --- | --- | --- | --- |"]
    for number, run in enumerate(shares, start=1):
        for size, one in run.items():
            twin = "-" if one.twin is None else f"{one.twin:.2f}"
            row = [str(number), bytes_text(size), str(iterations), one.best, f"{one.reaches:.2f}", twin]
            lines.append(f"| {' | '.join(row)} |")
    every = [one for run in shares for one in run.values()]
    reached = sum(one.reaches >= AUTO_TARGET for one in every)
    noise = [one.twin for one in every if one.twin is not None]
    lines += ["", f"auto / best is at least {AUTO_TARGET} in {reached} of {len(every)} cells"]
    if noise:
        below = sum(one < AUTO_TARGET for one in noise)
        lines.append(
            f"the best against itself: {min(noise):.2f} to {max(noise):.2f}, below {AUTO_TARGET} in {below} of "
            f"{len(noise)} cells: so much is noise"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--grid", default="1x4")
    parser.add_argument("--sizes", default=BenchRequest.sizes)
    parser.add_argument("--json", type=Path, help="write everything to this file")
    options = parser.parse_args(argv)
    if options.iterations < 2:
        raise SystemExit(f"{options.iterations} iterations cannot be halved; give at least 2, 8 for a control")
    sizes = [parse_size(word) for word in options.sizes.split(",")]
    shares: list[dict[int, AutoShare]] = []
    runs: list[tuple[Seconds, dict[int, str]]] = []
    for _ in range(options.runs):
        arguments = (options.grid, sizes, options.iterations)
        runs.append(local_ranks(options.workers, measure, *arguments, timeout_seconds=_TIMEOUT_SECONDS)[0])
        found = {size: auto_against_best(rounds) for size, rounds in runs[-1][0].items()}
        shares.append({size: one for size, one in found.items() if one is not None})
    print(f"{options.workers} local ranks, grid {options.grid}", *lines_of(shares, options.iterations), sep="\n")
    print("", "what auto chose:", sep="\n")
    for number, (_, choices) in enumerate(runs, start=1):
        print(*(f"- run {number}, {bytes_text(size)}: {reason}" for size, reason in choices.items()), sep="\n")
    if options.json:
        kept = [
            {"seconds": seconds, "choices": choices, "shares": {size: vars(one) for size, one in of_run.items()}}
            for (seconds, choices), of_run in zip(runs, shares, strict=True)
        ]
        content = {"workers": options.workers, "grid": options.grid, "target": AUTO_TARGET, "runs": kept}
        options.json.write_text(json.dumps(content) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
