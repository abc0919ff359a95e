"""The training run, from an opened world to a finished model.

`train` reads top to bottom: build, restore, walk through the phases (`megabatch.train.phase` has the loop), finish. All
workers walk through it alike; only the first one writes files and is_main.
"""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megabatch.comm.shape import GridShape
from megabatch.config import Config
from megabatch.files import write_atomically, write_json
from megabatch.train.aftermath import gather_ranks, report_at_the_end
from megabatch.train.build import build_workbench
from megabatch.train.derived import derived_lines
from megabatch.train.environment import describe_environment, describe_gradients
from megabatch.train.evaluate import Evaluation
from megabatch.train.folder import changes_on_resume, hold
from megabatch.train.members import weights_bytes
from megabatch.train.outcome import summary_of
from megabatch.train.phase import Ending, run_phase
from megabatch.train.progress import Progress
from megabatch.train.recorder import Recorder
from megabatch.train.segment import Segment, phases_of, planned_samples, trunk_clock
from megabatch.train.session import Session
from megabatch.train.snapshot import RunState, restore
from megabatch.train.step import warm_up_pass
from megabatch.train.stop import StopRequest
from megabatch.train.world import World

__all__ = ["train"]


def train(
    config: Config, world: World, device: torch.device, folder: Path, grid: GridShape, resume: bool, plan: str = ""
) -> dict[str, Any]:
    """Train to the end of the recipe, to `max_steps` or to a stop signal; return the summary of the run.

    plan: the text of the plan the run follows, kept with it.
    """
    progress, stop = Progress(is_main=world.is_main), StopRequest().listen()
    bench = build_workbench(config, world, grid, device)
    run = RunState(trunk_clock(config, len(bench.train_source)))
    planned = planned_samples(config, len(bench.train_source))
    environment = describe_environment(world, _hosts(world), grid, device)
    if world.is_main:  # who writes it
        environment |= describe_gradients(bench.network, bench.train_source.channels, config.data.image_size)

    with ExitStack() as stack:
        if world.is_main:
            for line in changes_on_resume(folder, config) if resume else []:
                progress.say(line)
            stack.enter_context(hold(folder, config, resume))
            write_json(folder / "environment.json", environment)
            if plan:
                write_atomically(folder / "plan.json", plan)
        for line in [*derived_lines(config, run.clock, world.size, grid, bench.network), *bench.choices]:
            progress.say(line)
        metrics_bytes, trunk = 0, None
        if resume:
            metrics_bytes, trunk = restore(bench, run, folder, progress.say)
        recorder = None
        if world.is_main:
            recorder = stack.enter_context(
                closing(Recorder(folder, metrics_bytes, run.clock.steps, config, progress.say))
            )
        session = Session(bench, run, folder, planned, progress, stop, recorder, trunk)
        warm_up_pass(bench)
        stack.enter_context(progress.showing(session.overall, planned))
        session.began = time.perf_counter() - run.wall_seconds

        ending = Ending.OVER
        for phase in phases_of(config)[run.phase :]:
            segment = session.enter(phase)
            ending = run_phase(session, segment)
            if ending != Ending.OVER:
                break
            session.leave(segment)

        stopped_by = (stop.signal_name or "a signal to another worker") if ending == Ending.STOPPED else ""
        evaluation = None if stopped_by else _final_evaluation(session, segment, ending)
        summary = summary_of(run, config, world.size, evaluation, stopped_by)
        summary["broken_images"] = session.feeds.total_broken(device)
        ranks = gather_ranks(bench.watch, environment["hosts"])
        if world.is_main:
            if not stopped_by:
                write_atomically(folder / "model.safetensors", _model_bytes(session, ending))
            write_json(folder / "ranks.json", ranks)
            write_json(folder / "summary.json", summary)
            assert recorder is not None
            recorder.end(summary)
    if world.is_main:
        report_at_the_end(folder, progress.say)
    return summary


def _final_evaluation(session: Session, segment: Segment, ending: Ending) -> Evaluation:
    """Of the model that the run leaves behind: the last collapsed member, or the network as it is."""
    if ending == Ending.OVER and session.run.members:
        member = session.run.members[-1]
        num_images = len(session.bench.val_source)
        return Evaluation(member["top1"], member["top5"], member["val_loss"], num_images)
    return session.evaluation or session.evaluate(segment)  # nothing was left to train: a finished run was resumed


def _model_bytes(session: Session, ending: Ending) -> bytes:
    if ending == Ending.OVER and session.run.members:
        member: bytes = (session.folder / session.run.members[-1]["file"]).read_bytes()
        return member
    return weights_bytes(session.bench.network)


def _hosts(world: World) -> list[str]:
    hosts: list[str] = [""] * world.size
    dist.all_gather_object(hosts, socket.gethostname())
    return hosts
