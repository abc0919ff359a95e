"""What exact sums cost: time of a training step with comm.sums=exact over comm.sums=float.

    python -m benchmarks.exact_cost [--case resnet8] [--workers 2] [--repeats 10] [--rounds 10] [--profile] [--json]

Every rank holds three trainings: one with exact sums, one with sums in floats, and a twin of the latter. Each makes a
few steps in turn, in random order, so a busy machine is busy for all. A turn's time is that of the slowest rank. Beside
it stand the processor seconds of all ranks: they hardly depend on what else the machine does, and leave out waiting.
Two trainings in one process differ by some per cent for as long as it lives, by where their memory happens to lie, so
each repeat has new processes and builds its trainings in another order. Printed are the median over the repeats of the
ratio of a repeat (the median of its rounds) and its 95 % interval, by ranks of the sorted ratios: nothing is assumed
about their distribution. The same for the twin over its twin shows what ratio is noise. `--profile` adds where the
processor seconds of exact sums go.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from itertools import product
from operator import truediv
from typing import Any

from benchmarks.gate import local_ranks

TARGET = 1.03
KINDS = ("float", "exact", "twin")  # the last as the first
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


def measure(rank: int, workers: int, name: str, algorithm: str, rounds: int, repeat: int, profile: bool) -> Any:
    """On every rank: seconds and processor seconds of each turn, by training; and of exact sums by part."""
    import torch
    import torch.distributed as dist

    from megabatch.comm.shape import near_square
    from megabatch.data.loader import Ghost
    from megabatch.optim.build import schedule_optimizer
    from megabatch.recipes import load_config
    from megabatch.schedule.control import BatchControl
    from megabatch.train.components import build_components
    from megabatch.train.metrics import Stopwatch
    from megabatch.train.passes import warm_up_pass
    from megabatch.train.step import start_step
    from megabatch.workers.world import World

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
            started = start_step(components, step, ghosts, 0, watch)  # again by itself where a sum does not fit
            assert started is not None
            started.result()

        return one_step

    chance = random.Random(repeat)  # the same on all ranks
    trainings: dict[str, Callable[[], None]] = {}
    for kind in chance.sample(KINDS, len(KINDS)):
        trainings[kind] = training("exact" if kind == "exact" else "float")
    for one_step in trainings.values():
        for _ in range(3):
            one_step()
    spent: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    turns: dict[str, list[float]] = {kind: [] for kind in KINDS}
    cpu: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind in chance.sample(KINDS, len(KINDS)):
            dist.barrier()
            with timed(spent) if profile and kind == "exact" else nullcontext():
                begin, cpu_begin = time.perf_counter(), time.process_time()
                for _ in range(turn_steps):
                    trainings[kind]()
                turns[kind].append((time.perf_counter() - begin) / turn_steps)
                cpu[kind].append((time.process_time() - cpu_begin) / turn_steps)
    slowest = torch.tensor([turns[kind] for kind in KINDS], dtype=torch.float64)
    cpu_total = torch.tensor([cpu[kind] for kind in KINDS], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(cpu_total)
    dist.barrier()
    dist.destroy_process_group()
    parts = {part: seconds / (rounds * turn_steps) for part, seconds in spent.items()}
    return dict(zip(KINDS, slowest.tolist(), strict=True)), dict(zip(KINDS, cpu_total.tolist(), strict=True)), parts


@contextmanager
def timed(spent: dict[str, float]) -> Iterator[None]:
    """Add up the processor seconds spent in the methods of PARTS; sums in floats need the statistics, too."""
    from importlib import import_module

    originals = []
    for part, (module, owner, method) in PARTS.items():
        kind = getattr(import_module(module), owner)
        original = getattr(kind, method)

        def wrapped(*args: Any, _part: str = part, _original: Callable[..., Any] = original, **options: Any) -> Any:
            begin = time.thread_time()
            try:
                return _original(*args, **options)
            finally:
                spent[_part] += time.thread_time() - begin

        setattr(kind, method, wrapped)
        originals.append((kind, method, original))
    yield
    for kind, method, original in originals:
        setattr(kind, method, original)


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """At least 95 % sure to hold the median, whatever the distribution: by the binomial of being below it."""
    ordered, count = sorted(values), len(values)
    below, lowest = 0.0, 0
    while (below := below + math.comb(count, lowest) / 2**count) <= 0.025:
        lowest += 1
    return ordered[max(0, lowest - 1)], ordered[min(count - 1, count - lowest)]


def summary(repeats: Sequence[dict[str, list[float]]], kind: str) -> dict[str, Any]:
    """The seconds of a training over those of the one in floats: median over the repeats, with interval and n.

    repeats: seconds of each turn, by training.
    """
    of_repeats = [statistics.median(map(truediv, turns[kind], turns["float"])) for turns in repeats]
    return {
        "ratio": statistics.median(of_repeats),
        "interval": list(interval_of_median(of_repeats)),
        "repeats": len(of_repeats),
        "rounds": len(repeats[0][kind]),
        "seconds": statistics.median(second for turns in repeats for second in turns[kind]),
        "float_seconds": statistics.median(second for turns in repeats for second in turns["float"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10, help="each with new processes")
    parser.add_argument("--rounds", type=int, default=10, help="in each repeat")
    parser.add_argument("--algorithm", default="torus")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results: dict[str, Any] = {"target": TARGET, "workers": options.workers, "algorithm": options.algorithm}
    for name in CASES if options.case == "all" else [options.case]:
        clocks: tuple[list[dict[str, list[float]]], ...] = ([], [])
        for repeat in range(options.repeats):
            arguments = (options.workers, name, options.algorithm, options.rounds, repeat, options.profile)
            [(*seconds, parts), *_] = local_ranks(options.workers, measure, *arguments, timeout_seconds=7200)
            for found, of_repeat in zip(clocks, seconds, strict=True):
                found.append(of_repeat)
        for kind, clock in product(KINDS[1:], ("wall clock", "processor")):
            found_of = summary(clocks[clock == "processor"], kind)
            results[f"{name}, {kind} over float, {clock}"] = found_of
            low, high = found_of["interval"]
            if not options.json:
                print(
                    f"{name}, {kind} over float, {clock}: ratio {found_of['ratio']:.3f} [{low:.3f} - {high:.3f}], "
                    f"n = {found_of['repeats']} repeats of {found_of['rounds']} rounds; "
                    f"{found_of['seconds'] * 1e3:.1f} and {found_of['float_seconds'] * 1e3:.1f} ms a step",
                    flush=True,
                )
        if options.profile:
            results[f"{name}, parts"] = parts
            for part, second in parts.items() if not options.json else ():
                print(f"    {part:24} {second * 1e3:8.3f} ms a step on rank 0, last repeat")
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
