"""Measures training steps by local batch on the machine at hand, without data and without gradients travelling.

With several workers all of them compute at the same time, as in a run: they share cores and memory, and the slowest
counts. What comes out is the table of step times that `megabatch plan` starts from.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megabatch.config import Config
from megabatch.errors import ConfigError
from megabatch.workers.local import run_as_worker, start_workers
from megabatch.workers.meeting import join
from megabatch.workers.world import World, choose_device, read_world

_TIMEOUT_SECONDS = 600.0
_WARM_UP = 2


@dataclass(frozen=True)
class StepBenchRequest:
    """What the user typed after `megabatch bench step`."""

    config: Config
    batches: tuple[int, ...]
    iterations: int = 10
    workers: int | None = None
    output: Path | None = None
    as_json: bool = False


Tell = Callable[[StepBenchRequest, dict[str, Any]], None]


def parse_batches(text: str, ghost_batch_size: int) -> tuple[int, ...]:
    """Read "16,32,64"; by default half, once and twice the ghost batch."""
    if not text:
        return tuple(sorted({max(2, ghost_batch_size // 2), ghost_batch_size, 2 * ghost_batch_size}))
    try:
        batches = sorted({int(word) for word in text.split(",")})
    except ValueError:
        raise ConfigError(f"batches '{text}' cannot be read; write whole numbers such as 16,32,64") from None
    if batches[0] < 2:
        raise ConfigError(f"local batch {batches[0]} is too small for batch-norm; give at least 2")
    return tuple(batches)


def bench_steps(request: StepBenchRequest, tell: Tell, environ: Mapping[str, str]) -> int:
    """Measure here, in a launcher's world or in local workers; returns the exit code.

    tell: called with the request and the result, in the process that is to tell it; a function of a module.
    """
    world = read_world(environ, alone=request.workers is not None)
    if world is None and (request.workers or 1) > 1:
        return start_workers(request.workers or 1, _start_work, replace(request, workers=None), tell)
    if world is None:
        import torch

        from megabatch.train.components import set_threads

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        set_threads(request.config, 1)
        tell(request, measure_steps(request, device, lambda: None))
        return 0
    return run_as_worker(lambda: _measure_in(world, request, tell), world, environ)


def _start_work(request: StepBenchRequest, tell: Tell) -> int:
    """What a local worker does."""
    return bench_steps(request, tell, os.environ)


def _measure_in(world: World, request: StepBenchRequest, tell: Tell) -> int:
    import torch.distributed as dist

    from megabatch.comm.messages import gather
    from megabatch.train.components import set_threads

    device, backend = choose_device("auto", world)
    set_threads(request.config, world.local_size)
    with join(world, backend, _TIMEOUT_SECONDS, device):
        mine = measure_steps(request, device, dist.barrier)
        everybody = gather(mine, dict[str, Any])
        if world.is_main:
            slowest = max(everybody, key=lambda one: sum(row["seconds"] for row in one["rows"]))
            tell(request, {**slowest, "workers": world.size})
    return 0


def measure_steps(request: StepBenchRequest, device: Any, together: Callable[[], object]) -> dict[str, Any]:
    """The content of a file of step times; `together` is called before each round, on every rank."""
    import torch

    from megabatch.model.normaliser import normaliser_of
    from megabatch.optim.build import build_optimizer
    from megabatch.train.components import build_network
    from megabatch.train.describe import list_layers

    config = request.config
    channels = 1 if len(config.data.mean) == 1 else 3
    classes = config.data.num_classes or config.data.generated.num_classes
    network = build_network(config, classes, channels, device)
    step = partial(
        _step, config, network, normaliser_of(config, channels, device), build_optimizer(config.optimizer, network)
    )
    size = config.data.image_size
    # Batches take turns, so that a busy moment of the machine falls on all of them alike.
    inputs = {
        batch: (
            torch.randint(0, 256, (batch, size, size, channels), dtype=torch.uint8),
            torch.randint(0, classes, (batch,), device=device),
        )
        for batch in request.batches
    }
    measured: dict[int, list[tuple[float, float]]] = {batch: [] for batch in request.batches}
    for _ in range(_WARM_UP + request.iterations):
        together()
        for batch, (images, labels) in inputs.items():
            measured[batch].append(step(images, labels))
    found = [(batch, every[_WARM_UP:]) for batch, every in measured.items()]
    shares = [statistics.median(backward / seconds for seconds, backward in times) for _, times in found]
    return {
        "megabatch_step_times": 1,
        "model": config.model.label,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "backward_share": statistics.median(shares),
        "layers": list_layers(network, torch.zeros(2, channels, size, size, device=device)),
        "rows": [_row(batch, [seconds for seconds, _ in times]) for batch, times in found],
        "image_size": size,
        "workers": 1,
        "versions": {"torch": torch.__version__},
    }


def _step(
    config: Config, network: Any, normalise: Callable[[Any], Any], optimizer: Any, images: Any, labels: Any
) -> tuple[float, float]:
    """Seconds of one step, and of its backward pass."""
    import torch
    from torch.nn import functional as F

    from megabatch.train.components import autocast_of

    def now() -> float:
        if labels.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    begin = now()
    with autocast_of(config, labels.device):
        logits = network(normalise(images))
    loss = F.cross_entropy(logits.float(), labels)
    forward = now()
    loss.backward()
    backward = now()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return now() - begin, backward - forward


def _row(batch: int, times: list[float]) -> dict[str, Any]:
    whole, median = sorted(times), statistics.median(times)
    # 10th to 90th percentile of a normal law is 2.56 deviations wide.
    spread = (whole[int(0.9 * (len(whole) - 1))] - whole[int(0.1 * (len(whole) - 1))]) / 2.56
    return {"local_batch": batch, "seconds": median, "deviation": spread / median, "iterations": len(times)}
