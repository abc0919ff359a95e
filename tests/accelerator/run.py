"""Steps of a recipe on a fake CUDA device: what they wait for, and how many kernels they launch.

python -m tests.accelerator.run mikami2018 train.precision=fp16 --ranks 8       prints it
python -m tests.accelerator.run --scenarios                                     all of `scenarios`, as lines of JSON
"""

from __future__ import annotations

from tests.accelerator import stub  # isort: skip

stub.load()  # before torch

# ruff: noqa: E402
import argparse
import json
import os
import warnings
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from unittest.mock import patch

import torch

from megabatch.comm.shape import near_square
from megabatch.config import Config
from megabatch.data.loader import Ghost
from megabatch.optim.build import schedule_optimizer
from megabatch.recipes import load_config
from megabatch.schedule.control import BatchControl
from megabatch.train import graph as graph_module
from megabatch.train.components import Components, build_components
from megabatch.train.metrics import Stopwatch
from megabatch.train.passes import warm_up_pass
from megabatch.train.step import start_step
from megabatch.workers.world import World
from tests.accelerator.bugs import seeded
from tests.accelerator.fake_cuda import CUDA, fake_cuda, steady
from tests.accelerator.others import checkpoint, evaluation, own_loop, statistics_without_batches
from tests.accelerator.scenarios import GHOST, SCENARIOS, Scenario
from tests.accelerator.watch import Notes, Watch, fresh_notes


def main() -> None:
    warnings.filterwarnings("ignore", "Grad strides do not match")  # fake tensors take another layout for 1x1
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", nargs="?", default="demo")
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--ghosts", type=int, default=1, help="ghost batches of each rank")
    parser.add_argument("--eager-steps", type=int, default=1, help="before train.cuda_graph captures")
    parser.add_argument("--places", type=int, default=12, help="how many places to print")
    parser.add_argument("--scenarios", nargs="?", const="", metavar="WORD", help="those with this word in their name")
    given = parser.parse_intermixed_args()
    if given.scenarios is not None:
        with fake_cuda():  # what torch loads for its first fake tensors is then there in every child
            torch.nn.Conv2d(3, 3, 3).to(CUDA)(torch.zeros(1, 3, 8, 8, device=CUDA))
        for name, scenario in SCENARIOS.items():
            if given.scenarios in name:
                print_apart(name, scenario)
        return
    scenario = Scenario(given.recipe, tuple(given.settings), given.ranks, given.ghosts, eager_steps=given.eager_steps)
    notes = notes_of(scenario)
    whats = ["waits", "kernels", *(["captured", "forbidden"] if notes.captured else [])]
    for what in whats:
        counts: Counter[str] = getattr(notes, what)
        print(f"{counts.total():6} {what}")
        for place, count in counts.most_common(given.places):
            print(f"{count:6}   {place}")


def print_apart(name: str, scenario: Scenario) -> None:
    """Print what a scenario does, as a line of JSON, from a process of its own: C++ may spoil what fakes pretend."""
    child = os.fork()
    if child == 0:
        print(json.dumps({"name": name, **found_in(scenario)}), flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        print(json.dumps({"name": name, "error": f"ended with status {status}"}), flush=True)


def found_in(scenario: Scenario) -> dict[str, object]:
    """What a scenario waits for, as plain values; an error is told, not raised."""
    try:
        notes = notes_of(scenario)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    found = {"waits": dict(notes.waits), "kernels": notes.num_kernels, "lags": notes.lags}
    return {**found, "captured": notes.captured.total(), "forbidden": dict(notes.forbidden)}


def notes_of(scenario: Scenario) -> Notes:
    """What the last of a few steps waits for and launches."""
    batch = scenario.ranks * scenario.ghosts * GHOST
    if scenario.idle:
        batch //= 2  # of two ranks the second has a ghost batch
    epochs = accumulate(scenario.stages, initial=0)
    batches = " ".join(f"{epoch}:{batch * times}" for epoch, times in zip(epochs, scenario.stages, strict=False))
    sizes = (f"train.ghost_batch_size={GHOST}", f"train.global_batch_size={batches}")
    source = ("data.source=generated", "data.path=", "data.generated.num_train=4096", "data.generated.num_val=600")
    config = load_config(scenario.recipe, [*source, *sizes, *scenario.settings])
    eager = patch.multiple(graph_module, EAGER_STEPS=scenario.eager_steps, EAGER_STEPS_OF_A_KIND=1)
    with fake_cuda(scenario.ranks) as watch, seeded(scenario.bug), eager:
        world = World(0, scenario.ranks, 0, min(scenario.ranks, 4), "torchrun", "host", 1)
        components = build_components(config, world, near_square(scenario.ranks), CUDA)
        steady(components.ddp)
        warm_up_pass(components)
        if scenario.kind == "own loop":
            return own_loop(components, watch)
        notes = _steps(components, batch, scenario.stages, watch)
        if scenario.kind == "evaluation":
            return evaluation(components, watch)
        if scenario.kind == "statistics":
            return statistics_without_batches(components, watch)
        return checkpoint(components, watch) if scenario.kind == "checkpoint" else notes


def _steps(components: Components, samples_per_epoch: int, stages: Sequence[int], watch: Watch) -> Notes:
    config, world = components.config, components.world
    control = BatchControl(
        config.train.global_batch_size,
        ghost_batch_size=GHOST,
        samples_per_epoch=samples_per_epoch,
        epochs=sum(stages),
        rank=world.rank,
        world_size=world.size,
        max_steps=len(stages),
    )
    stopwatch, before = Stopwatch(host_clock_tells=False), None
    for step in control:
        channels = components.train_source.channels
        ghosts = [_ghost(config, channels, number, step.is_idle) for number, _ in enumerate(step.ghosts)]
        with fresh_notes(watch) as notes:
            schedule_optimizer(components.optimizer, config.optimizer, step.epoch, step=step)
            started = None
            while started is None:  # the first exact sum is always repeated
                started = start_step(components, step, ghosts, config.train.seed, stopwatch)
            if not components.decides_on_device:
                started.result()
            elif before is not None:
                before.result()  # as the trainer does: when the next one has been started
            before = started
    return notes


def _ghost(config: Config, channels: int, number: int, idle: bool) -> Ghost:
    """Images as the loader hands them out, in pinned memory."""
    size = config.data.image_size
    images = torch.zeros(GHOST, size, size, channels, dtype=torch.uint8)
    return Ghost(images.pin_memory(), torch.zeros(GHOST, dtype=torch.int64).pin_memory(), number, idle)


if __name__ == "__main__":
    main()
