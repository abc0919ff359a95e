"""A whole training step on an emulated network: plain DDP against DDP with megabatch's gradient hook.

    sudo .venv/bin/python -m benchmarks.training_step_network [--quick] [--network shared-nic] [--json FILE]

16 ranks train a small ResNet with over 5 MB of gradients on small images, so that the network and not the two cores
decides. All variants have the same model, data, optimizer and DDP arguments; the hook is the only difference. They
take their steps in turn, in an order that rotates; a step lasts from a start that the ranks agree on off the network
until the slowest rank has updated its weights. No round of steps begins after `--seconds` of measuring. After the three
steps that warm up every variant must hold the weights of plain DDP, up to rounding; later steps amplify it, with batch
norms of a few small images. `bfloat16` on the wire halves the bytes: no like-for-like comparison, and shown as such.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.allreduce_table import Timing
from benchmarks.gate import StartGate, make_gate_file
from benchmarks.netlab import NETWORKS, laboratory, named_network
from megabatch.comm.grid import ProcessGrid
from megabatch.comm.hook import GradientHook, gradient_hook
from megabatch.comm.measure import gather
from megabatch.errors import MegabatchError
from megabatch.model.small import resnet8

__all__ = ["StepPlan", "StepReport", "main", "run_steps", "table_lines", "wrong_variants"]

TARGET = 1.5
VARIANTS = ("default", "torus", "auto", "torus+bfloat16")
_PLAIN = "default"
_WARM_UPS = 3  # DDP rebuilds its buckets after the first step
_TIMEOUT_SECONDS = 60.0
_SET_UP_SECONDS = 120.0  # connections, four models, `auto`'s own measurement, and the round under way at the end
_TOLERANCE = 1e-5
_ROUNDED_TOLERANCE = 0.05


@dataclass(frozen=True)
class StepPlan:
    """What every rank trains: images per rank and step, their side, the width of the network, the variants."""

    steps: int
    seconds: float
    images_per_rank: int
    side: int
    width: int
    bucket_cap_mb: float
    variants: tuple[str, ...]


@dataclass
class StepReport:
    """What a rank saw: seconds by variant and step, distance of its weights from plain DDP's, choices of `auto`."""

    gradient_bytes: int = 0
    compute_seconds: list[float] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    distance: dict[str, float] = field(default_factory=dict)
    choices: list[str] = field(default_factory=list)


@dataclass
class _Variant:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    hook: GradientHook | None


def run_steps(rank: int, grid_text: str, plan: StepPlan, gate_file: Path) -> StepReport:
    """Train all variants step by step in turn."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_SECONDS))
    grid = ProcessGrid.build(grid_text, timeout_seconds=_TIMEOUT_SECONDS)
    gate = StartGate(gate_file, rank, grid.world_size, _TIMEOUT_SECONDS)
    report = StepReport()
    variants = {name: _variant(name, grid, plan, report) for name in plan.variants}
    report.gradient_bytes = sum(4 * weight.numel() for weight in variants[plan.variants[0]].model.parameters())
    report.seconds = {name: [] for name in variants}
    data = torch.Generator().manual_seed(rank)
    order = list(variants)
    begin = time.monotonic()
    for step in range(-_WARM_UPS, plan.steps):
        # Gathered, so that all ranks stop after the same step.
        if step > 0 and max(gather(grid, [time.monotonic() - begin]))[0] > plan.seconds:
            break
        if step == 0:
            plain = _weights(variants[plan.variants[0]].model)
            for name, variant in variants.items():
                report.distance[name] = float((_weights(variant.model) - plain).norm() / plain.norm())
        images = torch.rand(plan.images_per_rank, 3, plan.side, plan.side, generator=data)
        labels = torch.randint(0, 10, (plan.images_per_rank,), generator=data)
        for name in order:
            start = gate.wait()
            _train(variants[name], images, labels)
            if step >= 0:
                report.seconds[name].append(time.perf_counter() - start)
        order = order[1:] + order[:1]
        start = gate.wait()
        _compute_alone(variants[plan.variants[0]], images, labels)
        if step >= 0:
            report.compute_seconds.append(time.perf_counter() - start)
    gate.wait()
    for variant in variants.values():
        if variant.hook is not None:
            variant.hook.close()
    dist.destroy_process_group()
    return report


def _variant(name: str, grid: ProcessGrid, plan: StepPlan, report: StepReport) -> _Variant:
    torch.manual_seed(0)
    network = resnet8(width=plan.width).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    # Statistics of batch norms stay local: sending them is no gradient synchronisation. torch 2.13 renamed the switch.
    known = inspect.signature(DistributedDataParallel).parameters
    switch: Any = {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
    model = DistributedDataParallel(network, bucket_cap_mb=plan.bucket_cap_mb, gradient_as_bucket_view=True, **switch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    if name == _PLAIN:
        return _Variant(model, optimizer, None)
    algorithm, _, grad_dtype = name.partition("+")
    state, hook = gradient_hook(grid, algorithm, grad_dtype=getattr(torch, grad_dtype) if grad_dtype else None)
    if algorithm == "auto":
        report.choices = _auto_reasons(state)
    model.register_comm_hook(state, hook)
    return _Variant(model, optimizer, state)


def _auto_reasons(state: GradientHook) -> list[str]:
    """What `auto` has chosen, smallest message first."""
    from megabatch.comm.select import AutoReducer

    return AutoReducer(state.grid).explanation  # the choices are kept with the grid: nothing is measured again


def _weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([weight.detach().reshape(-1) for weight in model.parameters()])


def _train(variant: _Variant, images: torch.Tensor, labels: torch.Tensor) -> None:
    variant.optimizer.zero_grad(set_to_none=True)
    F.cross_entropy(variant.model(images), labels).backward()
    variant.optimizer.step()


def _compute_alone(variant: _Variant, images: torch.Tensor, labels: torch.Tensor) -> None:
    """The same forward and backward pass without any communication, to say what it takes; gradients are dropped."""
    assert isinstance(variant.model, DistributedDataParallel)
    with variant.model.no_sync():
        F.cross_entropy(variant.model(images), labels).backward()
    variant.optimizer.zero_grad(set_to_none=True)


def table_lines(timings: dict[str, Timing], images_per_step: int) -> list[str]:
    """One row per variant: step time, images per second, ratio to plain DDP."""
    lines = ["| variant | step, ms | images/s | against plain DDP | n |", "| --- | --- | --- | --- | --- |"]
    for name, timing in timings.items():
        ratio = timings[_PLAIN].median / timing.median
        columns = [name, str(timing), f"{images_per_step / timing.median:.0f}", f"{ratio:.2f}", str(timing.n)]
        lines.append(f"| {' | '.join(columns)} |")
    return lines


def wrong_variants(reports: Sequence[StepReport]) -> list[str]:
    """Variants whose weights are farther from plain DDP's than rounding explains."""
    wrong = []
    for name in reports[0].distance:
        allowed = _ROUNDED_TOLERANCE if "+" in name else _TOLERANCE
        distance = max(report.distance[name] for report in reports)
        if not distance <= allowed:
            wrong.append(f"{name} is {distance:.2g} off, {allowed:g} allowed")
    return wrong


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, measure, print."""
    options = _parser().parse_args(argv)
    names = tuple(options.variants.split(","))
    if names[0] != _PLAIN:
        raise SystemExit(f"the first variant is '{names[0]}'; begin with '{_PLAIN}', the one to compare with")
    steps = 3 if options.quick else options.steps
    plan = StepPlan(steps, options.seconds, options.images, options.side, options.width, options.bucket_cap_mb, names)
    try:
        network = named_network(options.network)
        with tempfile.TemporaryDirectory(prefix="gate-") as folder, laboratory(network) as lab:
            gate_file = Path(folder) / "gate"
            make_gate_file(gate_file, network.world_size)
            limit = plan.seconds + _SET_UP_SECONDS
            reports = lab.fork_ranks(run_steps, "4x4", plan, gate_file, timeout_seconds=limit)
    except MegabatchError as error:
        raise SystemExit(str(error)) from None
    if wrong := wrong_variants(reports):
        raise SystemExit(f"nothing is reported, weights differ: {'; '.join(wrong)}")
    timings = {name: Timing.of([report.seconds[name] for report in reports]) for name in names}
    compute = Timing.of([report.compute_seconds for report in reports])
    images_per_step = plan.images_per_rank * network.world_size
    print(f"{options.network}: {network.describe()}; load average {os.getloadavg()[0]:.1f}")
    print(
        f"{reports[0].gradient_bytes / 1e6:.2f} MB of gradients, buckets of {plan.bucket_cap_mb:g} MiB, "
        f"{plan.images_per_rank} images of {plan.side} px per rank; forward and backward alone {compute} ms"
    )
    print(*table_lines(timings, images_per_step), sep="\n")
    told = ", ".join(f"{name} {max(report.distance[name] for report in reports):.1g}" for name in names[1:])
    print(f"weights after {_WARM_UPS} steps, distance from plain DDP's relative to their norm: {told}")
    print(f"wanted: {TARGET} with torus or auto", file=sys.stderr)
    for reason in reports[0].choices:
        print(f"- auto: {reason}")
    if options.json:
        options.json.write_text(json.dumps(_content(options, reports, timings, compute), indent=1) + "\n")


def _content(
    options: argparse.Namespace, reports: Sequence[StepReport], timings: dict[str, Timing], compute: Timing
) -> dict[str, Any]:
    return {
        "network": options.network,
        "gradient_bytes": reports[0].gradient_bytes,
        "bucket_cap_mb": options.bucket_cap_mb,
        "compute_seconds": compute.median,
        "variants": {
            name: {
                "seconds": [timing.median, timing.least, timing.most],
                "n": timing.n,
                "speed_up": timings[_PLAIN].median / timing.median,
                "weight_distance": max(report.distance[name] for report in reports),
            }
            for name, timing in timings.items()
        },
        "speed_up_target": TARGET,
        "auto_choices": reports[0].choices,
        "load_average": os.getloadavg()[0],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="shared-nic", help="of " + ", ".join(NETWORKS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=90.0, help="begin no further step after so long")
    parser.add_argument("--images", type=int, default=4, help="per rank and step")
    parser.add_argument("--side", type=int, default=8, help="of an image, px")
    parser.add_argument("--width", type=int, default=68, help="channels of the first stage; 68 gives 5.6 MB")
    parser.add_argument("--bucket-cap-mb", type=float, default=25.0, help="DDP's own default")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="the first must be 'default'")
    parser.add_argument("--quick", action="store_true", help="three steps: shows that it works")
    parser.add_argument("--json", type=Path, default=None, help="write everything to this file")
    return parser


if __name__ == "__main__":
    main()
