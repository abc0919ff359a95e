"""The chosen plan's all-reduce by three engines: the closed form that planned it, our own simulation, and SimGrid.

    python -m benchmarks.check_plan mikami2018 --cluster abci --workers 1024 [--algorithm torus] [--json]

Rounds are played in step. Chains and channels, which ranks do not run in step, are played free while they are few
enough: `mode` says which. Agreement speaks for the arithmetic; rates and latencies are the same in all three.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.simulators.simgrid import play, play_of
from benchmarks.simulators.simulate import lock_step_seconds, simulate_all_reduce
from megabatch.comm.phases import phases
from megabatch.errors import ConfigError, MegabatchError
from megabatch.plan.cluster import Cluster
from megabatch.plan.request import PlanRequest, run
from megabatch.plan.step import Candidate
from megabatch.plan.workload import Workload, fill_buckets

__all__ = ["CheckedBucket", "Crosscheck", "check_plan", "print_check"]

_MOST_FREE = 20_000


@dataclass(frozen=True, slots=True)
class CheckedBucket:
    """One size of bucket, how many of it there are, and the seconds of one all-reduce by each engine."""

    num_bytes: int
    count: int
    mode: str
    closed_form_seconds: float
    simulation_seconds: float
    simgrid_seconds: float

    @property
    def error(self) -> float:
        """The closed form over SimGrid, minus 1."""
        return self.closed_form_seconds / self.simgrid_seconds - 1


@dataclass(frozen=True, slots=True)
class Crosscheck:
    """All sizes of buckets of one plan, largest first, and the version of SimGrid."""

    buckets: tuple[CheckedBucket, ...]
    simgrid_version: str

    def as_data(self) -> dict[str, Any]:
        """For `--json`."""
        rows = [{**dataclasses.asdict(one), "error": one.error} for one in self.buckets]
        return {"simgrid_version": self.simgrid_version, "buckets": rows}


def check_plan(cluster: Cluster, workload: Workload, candidate: Candidate) -> Crosscheck:
    """Price and play the buckets of a candidate.

    Raises:
        ConfigError: nothing that can be played, too many transfers, or no SimGrid.
    """
    _refuse_unplayable(cluster, candidate)
    network, algorithm, grid = cluster.network, candidate.algorithm, candidate.grid
    phase_list = phases(algorithm, grid)
    cut = fill_buckets(workload.layers, workload.bytes_per_parameter, candidate.bucket_mb)
    sizes = sorted(Counter(bucket.num_bytes for bucket in cut).items(), reverse=True)
    several = max(phase.channel for phase in phase_list) > 0
    free = several or any(phase.pattern == "chain" for phase in phase_list)
    if free and not several:
        free = len(sizes) * play_of(algorithm, grid, 1.0, free=True).num_transfers <= _MOST_FREE
    plays = [play_of(algorithm, grid, num_bytes, free=free) for num_bytes, _ in sizes]
    answer = play(network, plays)
    found = []
    for (num_bytes, count), one, seconds in zip(sizes, plays, answer.seconds, strict=True):
        if free:
            own = simulate_all_reduce(network, algorithm, grid, num_bytes)
        else:
            own = lock_step_seconds(network, one.channels[0], grid.world_size, num_bytes)
        closed = cluster.all_reduce(algorithm, grid, num_bytes).seconds
        found.append(CheckedBucket(num_bytes, count, "free" if free else "in step", closed, own, seconds))
    return Crosscheck(tuple(found), answer.version)


def _refuse_unplayable(cluster: Cluster, candidate: Candidate) -> None:
    if candidate.workers == 1:
        raise ConfigError("the plan is for 1 worker, which reduces nothing to check; plan for more with --workers")
    if cluster.calibration is not None:
        raise ConfigError(
            "the plan is priced by measured axes, and SimGrid needs links; leave the links.json of --calibrate out"
        )
    if candidate.algorithm == "backend" and cluster.network.collectives == "tree":
        raise ConfigError(
            f"the plan takes the backend's own all-reduce, on '{cluster.name}' a formula without phases to play; "
            "name another with --algorithm, such as torus"
        )


def print_check(check: Crosscheck, console: Console | None = None) -> None:
    """One all-reduce of each size of bucket by three engines."""
    out = console or Console(highlight=False, soft_wrap=True)
    heads = ("bucket", "times", "mode", "closed form", "simulation", "SimGrid", "difference")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for head in heads:
        table.add_column(head, justify="left" if head == "mode" else "right", no_wrap=True)
    for one in check.buckets:
        seconds = (one.closed_form_seconds, one.simulation_seconds, one.simgrid_seconds)
        times = (f"{1e3 * each:,.3f} ms" for each in seconds)
        table.add_row(f"{one.num_bytes / 2**20:.2f} MB", str(one.count), one.mode, *times, f"{one.error:+.3%}")
    out.print(f"[bold]Checked[/bold] with SimGrid {check.simgrid_version}, one all-reduce of each bucket")
    out.print(table)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--workers")
    parser.add_argument("--algorithm", action="append", default=[])
    parser.add_argument("--grid")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(words)
    try:
        found = run(
            PlanRequest(
                given.recipe,
                given.cluster,
                given.workers,
                algorithms=tuple(given.algorithm),
                grid=given.grid,
                overrides=tuple(given.set),
            )
        )
        check = check_plan(found.evidence.cluster, found.workload, found.result.chosen.candidate)
    except MegabatchError as error:
        sys.exit(f"benchmarks.check_plan: {error}")
    print(json.dumps(check.as_data())) if given.json else print_check(check)


if __name__ == "__main__":
    main()
