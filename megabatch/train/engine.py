"""The training run, from an opened world to a finished model.

`train` reads top to bottom: build, restore, loop (update, evaluate, log, checkpoint), finish. All workers walk through
it alike; only the first one writes files and speaks.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save as safetensors_bytes

from megabatch.comm.shape import GridShape
from megabatch.config import Config
from megabatch.data.loader import GhostLoader
from megabatch.errors import ConfigError, TrainingError
from megabatch.report.record import write_atomically, write_json
from megabatch.schedule.batch import Update, iterate_updates, parse_stages
from megabatch.schedule.clock import Clock
from megabatch.train.build import Workbench, augmentation_of, build_workbench
from megabatch.train.derived import derived_lines
from megabatch.train.environment import describe_environment
from megabatch.train.evaluate import Evaluation, evaluate
from megabatch.train.folder import hold
from megabatch.train.progress import Progress
from megabatch.train.recorder import Recorder
from megabatch.train.snapshot import RunState, restore, save
from megabatch.train.step import UpdateResult, rehearse, train_update
from megabatch.train.stop import StopRequest
from megabatch.train.world import World

__all__ = ["train"]


def train(
    config: Config, world: World, device: torch.device, folder: Path, grid: GridShape, resume: bool
) -> dict[str, Any]:
    """Train to the end of the recipe, to `max_updates` or to a stop signal; return the summary of the run."""
    progress, stop = Progress(speaks=world.is_first), StopRequest().listen()
    bench = build_workbench(config, world, grid, device)
    run = RunState(_clock(config, len(bench.train_source)))
    environment = describe_environment(world, _hosts(world), grid, device)
    evaluation: Evaluation | None = None
    stopped_by = ""

    with ExitStack() as stack:
        if world.is_first:
            stack.enter_context(hold(folder, config, resume))
            write_json(folder / "environment.json", environment)
        metrics_bytes = restore(bench, run, folder, progress.say) if resume else 0
        for line in [*derived_lines(config, run.clock, world.size, grid, bench.network), *bench.choices]:
            progress.say(line)
        recorder = None
        if world.is_first:
            recorder = stack.enter_context(closing(Recorder(folder, metrics_bytes, run.clock.updates)))
        end_samples = max((update.end_samples for update in _updates(config, run.clock)), default=run.clock.samples)
        loader = stack.enter_context(closing(_loader(bench, _updates(config, run.clock))))
        rehearse(bench)
        stack.enter_context(progress.showing(run.clock, end_samples))
        began = time.perf_counter() - run.wall_seconds

        for update, ghosts in loader:
            rates = bench.set_rates(update.start_epoch)
            result = train_update(bench, update, ghosts, stop.wanted)
            before, run.clock = run.clock, run.clock.after(update.num_samples)
            run.training_seconds += result.update_seconds
            _count_skipped(run, result)

            is_last = run.clock.samples == end_samples
            is_best, evaluation = False, None
            if not result.stop_wanted and (is_last or run.clock.crosses(before, config.train.evaluate_every_epochs)):
                evaluation = _evaluate(bench)
                is_best = evaluation.top1 > run.best_top1
                if is_best:
                    run.best_top1, run.best_update = evaluation.top1, run.clock.updates
            run.wall_seconds = time.perf_counter() - began
            row = _row(run, update, rates, result, evaluation)
            progress.show(run.clock, row)
            if recorder is not None:
                recorder.append(row)
            _stop_when_diverged(config, run, rates)
            due = result.stop_wanted or is_last or is_best or _checkpoint_is_due(config, run.clock, before)
            # A run whose gradients are not finite may be lost: its last good checkpoints must not make way for it.
            if due and (result.applied or result.stop_wanted):
                save(bench, run, folder, recorder.num_bytes if recorder else 0, is_best)
            if result.stop_wanted:
                stopped_by = stop.signal_name or "a signal to another worker"
                break
        else:
            if evaluation is None:
                evaluation = _evaluate(bench)  # nothing was left to train: a finished run was resumed

        summary = _summary(run, config, world, evaluation, stopped_by)
        if world.is_first:
            if not stopped_by:
                write_atomically(folder / "model.safetensors", _weights(bench))
            write_json(folder / "summary.json", summary)
    return summary


def _clock(config: Config, num_pictures: int) -> Clock:
    total_samples = round(config.train.epochs * num_pictures)
    if total_samples < config.train.ghost_batch:
        raise ConfigError(
            f"train.epochs {config.train.epochs:g} of {num_pictures} pictures is {total_samples}, a ghost batch needs "
            f"{config.train.ghost_batch}; give at least {config.train.ghost_batch / num_pictures:.4g} epochs"
        )
    return Clock(num_pictures, total_samples)


def _updates(config: Config, clock: Clock) -> Iterator[Update]:
    """What is left to do of the recipe, or up to `max_updates`."""
    updates = iterate_updates(
        parse_stages(config.train.batch_total).at,
        config.train.ghost_batch,
        clock.samples_per_epoch,
        clock.total_samples,
        start_samples=clock.samples,
        start_index=clock.updates,
    )
    limit = config.train.max_updates
    return itertools.islice(updates, max(0, limit - clock.updates)) if limit else updates


def _loader(bench: Workbench, updates: Iterator[Update]) -> GhostLoader:
    config = bench.config
    return GhostLoader(
        bench.train_source,
        augmentation_of(config),
        config.data.image_size,
        config.train.seed,
        updates,
        worker=bench.world.rank,
        num_workers=bench.world.size,
        prefetch_ghosts=config.data.prefetch_ghosts,
        pin_for=bench.device if bench.device.type == "cuda" else None,
    )


def _hosts(world: World) -> list[str]:
    hosts: list[str] = [""] * world.size
    dist.all_gather_object(hosts, socket.gethostname())
    return hosts


def _checkpoint_is_due(config: Config, clock: Clock, before: Clock) -> bool:
    every_updates = config.checkpoint.every_updates
    by_updates = bool(every_updates) and clock.updates % every_updates == 0
    return by_updates or clock.crosses(before, config.checkpoint.every_epochs)


def _count_skipped(run: RunState, result: UpdateResult) -> None:
    """Count updates that the optimiser left out because the gradient was not finite."""
    run.skipped_in_a_row = 0 if result.applied else run.skipped_in_a_row + 1
    run.skipped_updates += not result.applied


def _stop_when_diverged(config: Config, run: RunState, rates: dict[str, float]) -> None:
    limit = config.train.max_skipped_updates
    if run.skipped_in_a_row > limit:
        where = f"update {run.clock.updates}, epoch {run.clock.epoch:.3f}, rate {rates['learning_rate']:g}"
        raise TrainingError(
            f"{run.skipped_in_a_row} updates in a row had gradients that are not finite (the last at {where}; "
            f"at most {limit} are skipped); lower optimizer.learning_rate or lengthen its warm-up, then --resume"
        )


def _evaluate(bench: Workbench) -> Evaluation:
    bench.statistics.publish()
    config = bench.config
    return evaluate(
        bench.network,
        bench.val_source,
        config.data.image_size,
        bench.normalise,
        bench.autocast,
        config.train.evaluation_batch,
        bench.device,
    )


def _row(
    run: RunState,
    update: Update,
    rates: dict[str, float],
    result: UpdateResult,
    evaluation: Evaluation | None,
) -> dict[str, float | int]:
    row: dict[str, float | int] = {
        "update": run.clock.updates,
        "samples": run.clock.samples,
        "epoch": run.clock.epoch,
        "loss": result.loss,
        "top1": result.top1,
        **rates,
        "batch_total": update.num_samples,
        "images_per_second": update.num_samples / result.update_seconds,
        "gradient_norm": result.gradient_norm,
        "applied": int(result.applied),
        "wall_seconds": run.wall_seconds,
        "update_seconds": result.update_seconds,
        "data_seconds": result.data_seconds,
        "compute_seconds": result.compute_seconds,
        "communication_seconds": result.communication_seconds,
    }
    if evaluation is not None:
        row |= {"val_top1": evaluation.top1, "val_top5": evaluation.top5, "val_loss": evaluation.loss}
    return row


def _weights(bench: Workbench) -> bytes:
    # Clones, because weights that are tied share memory and the format does not store that.
    tensors = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in bench.network.state_dict().items()
    }
    # One entry only: the library writes several in an order that changes from run to run.
    return safetensors_bytes(tensors, metadata={"format": "pt"})


def _summary(
    run: RunState, config: Config, world: World, evaluation: Evaluation | None, stopped_by: str
) -> dict[str, Any]:
    return {
        "status": "stopped" if stopped_by else "finished",
        "stopped_by": stopped_by,
        "updates": run.clock.updates,
        "samples": run.clock.samples,
        "epoch": run.clock.epoch,
        "workers": world.size,
        "training_seconds": run.training_seconds,
        "wall_seconds": run.wall_seconds,
        "images_per_second": run.clock.samples / run.training_seconds if run.training_seconds else 0.0,
        "skipped_updates": run.skipped_updates,
        "model": config.model.name,
        "top1": evaluation.top1 if evaluation else None,
        "top5": evaluation.top5 if evaluation else None,
        "val_loss": evaluation.loss if evaluation else None,
        "val_pictures": evaluation.num_pictures if evaluation else None,
        "best_top1": run.best_top1 if run.best_top1 >= 0 else None,
    }
