"""What exact sums cost: time of a training step with comm.sums=exact over comm.sums=float.

    python -m benchmarks.exact_cost [--case resnet8] [--workers 2] [--rounds 40] [--algorithm torus] [--json]

Every rank holds two trainings that differ in `comm.sums` alone and makes a few steps of each in turn, in the order
exact, float, float, exact. A round's ratio is between two turns that follow one another, so a busy machine is busy for
both. A turn's time is that of the slowest rank. Beside it stand the processor seconds of all ranks: they hardly depend
on what else the machine does, and leave out waiting. What is printed is the median of the ratios with its 95 %
interval (by ranks of the sorted ratios: nothing is assumed about their distribution), and the same for a float training
against its own twin, which shows what ratio is noise. `--profile` adds where the time of exact sums goes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from benchmarks.gate import local_ranks

TARGET = 1.03
CASES: dict[str, tuple[int, tuple[str, ...]]] = {  # steps in a turn, settings
    "resnet8": (4, ("data.image_size=28", "data.generated.channels=1")),
    "resnet50": (
        1,
        (
            *(
                "model.name=resnet50",
                "data.image_size=64",
                "data.generated.channels=3",
                "data.generated.num_classes=1000",
            ),
            *("data.mean=[0.5]", "data.std=[0.25]", "train.ghost_batch_size=32", "train.global_batch_size=128"),
        ),
    ),
}
PARTS = {  # what exact sums add to a step
    "to integers": ("megabatch.comm.exact", "ExactSums", "to_integers"),
    "to floats": ("megabatch.comm.exact", "ExactSums", "to_floats"),
    "ghosts added": ("megabatch.comm.exact", "ExactSums", "add_ghost"),
    "begin of step": ("megabatch.comm.exact", "ExactSums", "begin_step"),
    "all-reduce of maxima": ("megabatch.comm.exact", "ExactSums", "end_step"),
    "statistics of the step": ("megabatch.model.norm", "GhostStatistics", "after_step"),
}


def measure(rank: int, workers: int, name: str, algorithm: str, rounds: int, twins: bool, profile: bool) -> Any:
    """On every rank: seconds of each turn, by training; and seconds a step by part."""
    import torch
    import torch.distributed as dist

    from megabatch.comm.shape import near_square
    from megabatch.data.loader import Ghost
    from megabatch.optim.build import schedule_optimizer
    from megabatch.recipes import load_config
    from megabatch.schedule.control import BatchControl
    from megabatch.train.components import build_components
    from megabatch.train.metrics import Stopwatch
    from megabatch.train.step import train_step, warm_up_pass
    from megabatch.train.world import World

    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    turn_steps, settings = CASES[name]
    world = World(rank, workers, rank, workers, "torchrun", "127.0.0.1", 0)

    def training(sums: str) -> Callable[[], None]:
        common = ["data.source=generated", "data.generated.num_train=2000", "data.generated.num_val=100"]
        common += [f"comm.sums={sums}", f"comm.algorithm={algorithm}", "optimizer.lr=0.01", "train.epochs=10000"]
        config = load_config("demo", [*common, *settings])
        components = build_components(config, world, near_square(workers), torch.device("cpu"))
        warm_up_pass(components)
        size, side, channels = config.train.ghost_batch_size, config.data.image_size, components.train_source.channels
        images = torch.randint(0, 256, (size, side, side, channels), dtype=torch.uint8)
        labels = torch.randint(0, 10, (size,))
        control = BatchControl(
            config.train.global_batch_size,
            ghost_batch_size=size,
            samples_per_epoch=2000,
            epochs=10000,
            rank=rank,
            world_size=workers,
        )
        steps, watch = iter(control), Stopwatch(host_clock_tells=True)

        def one_step() -> None:
            step = next(steps)
            ghosts = [Ghost(images, labels, positions.start // size, idle=False) for positions in step.ghosts]
            schedule_optimizer(components.optimizer, config.optimizer, step.epoch, step=step)
            while train_step(components, step, ghosts, 0, watch) is None:
                pass

        return one_step

    pair = [training("float" if twins else "exact"), training("float")]
    for one_step in pair:
        for _ in range(3):
            one_step()
    spent: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    turns: list[list[float]] = [[], []]
    cpu: list[list[float]] = [[], []]
    with timed(spent) if profile else nothing():
        for number in range(rounds):
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                dist.barrier()
                begin, cpu_begin = time.perf_counter(), time.process_time()
                for _ in range(turn_steps):
                    pair[which]()
                turns[which].append((time.perf_counter() - begin) / turn_steps)
                cpu[which].append((time.process_time() - cpu_begin) / turn_steps)
    slowest, cpu_total = torch.tensor(turns, dtype=torch.float64), torch.tensor(cpu, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(cpu_total)
    dist.barrier()
    dist.destroy_process_group()
    return (
        slowest.tolist(),
        cpu_total.tolist(),
        {part: seconds / (rounds * turn_steps) for part, seconds in spent.items()},
    )


@contextmanager
def timed(spent: dict[str, float]) -> Iterator[None]:
    """Add up the seconds spent in the methods of PARTS; the training in floats calls `after_step` too."""
    from importlib import import_module

    originals = []
    for part, (module, owner, method) in PARTS.items():
        kind = getattr(import_module(module), owner)
        original = getattr(kind, method)

        def wrapped(*args: Any, _part: str = part, _original: Callable[..., Any] = original) -> Any:
            begin = time.perf_counter()
            try:
                return _original(*args)
            finally:
                spent[_part] += time.perf_counter() - begin

        setattr(kind, method, wrapped)
        originals.append((kind, method, original))
    yield
    for kind, method, original in originals:
        setattr(kind, method, original)


@contextmanager
def nothing() -> Iterator[None]:
    yield


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """At least 95 % sure to hold the median, whatever the distribution: by the binomial of being below it."""
    ordered, count = sorted(values), len(values)
    below, lowest = 0.0, 0
    while (below := below + math.comb(count, lowest) / 2**count) <= 0.025:
        lowest += 1
    return ordered[max(0, lowest - 1)], ordered[min(count - 1, count - lowest)]


def summary(turns: list[list[float]]) -> dict[str, Any]:
    """Median of the paired ratios, with interval and n."""
    ratios = [exact / plain for exact, plain in zip(*turns, strict=True)]
    low, high = interval_of_median(ratios)
    return {
        "ratio": statistics.median(ratios),
        "interval": [low, high],
        "rounds": len(ratios),
        "exact_seconds": statistics.median(turns[0]),
        "float_seconds": statistics.median(turns[1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--algorithm", default="torus")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results: dict[str, Any] = {"target": TARGET, "workers": options.workers, "algorithm": options.algorithm}
    for name in CASES if options.case == "all" else [options.case]:
        for twins in (False, True):
            arguments = (options.workers, name, options.algorithm, options.rounds, twins, options.profile)
            [(turns, cpu, parts), *_] = local_ranks(options.workers, measure, *arguments, timeout_seconds=7200)
            found = summary(turns) | {f"cpu_{key}": value for key, value in summary(cpu).items() if key != "rounds"}
            what = "float over its twin" if twins else "exact over float"
            results[f"{name}, {what}"] = {**found, **({"parts": parts} if options.profile else {})}
            if options.json:
                continue
            for kind, clock in (("", "wall clock"), ("cpu_", "processor")):
                low, high = found[f"{kind}interval"]
                print(
                    f"{name}, {what}, {clock}: ratio {found[f'{kind}ratio']:.3f} [{low:.3f} - {high:.3f}], "
                    f"n = {found['rounds']}; {found[f'{kind}exact_seconds'] * 1e3:.1f} and "
                    f"{found[f'{kind}float_seconds'] * 1e3:.1f} ms a step",
                    flush=True,
                )
            if options.profile and not twins:
                for part, seconds in parts.items():
                    print(f"    {part:24} {seconds * 1e3:8.3f} ms a step on rank 0")
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
