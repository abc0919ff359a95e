"""From checked settings to a summary: trains in the world it finds, or starts local workers that do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from megabatch.comm.shape import GridShape, parse_grid
from megabatch.config import Config
from megabatch.errors import CheckpointError, LaunchError
from megabatch.train.elastic_entry import LEAVE_SIGNALS, check_elastic, start_elastic
from megabatch.train.request import TrainRequest
from megabatch.train.run_dir import check_output, default_output, is_default_output, status_of
from megabatch.workers.local import check_count, run_as_worker, start_workers
from megabatch.workers.meeting import Meeting, join
from megabatch.workers.token import TOKEN_VARIABLE, is_signed, open_to_others, sign
from megabatch.workers.world import (
    ALONE,
    World,
    choose_device,
    num_accelerators,
    on_main_rank,
    present_world,
    read_world,
)

__all__ = ["train", "train_here"]


def train(
    config: Config, *, output: str | Path | None = None, grid: str | None = None, resume: bool = False, plan: str = ""
) -> dict[str, Any]:
    """Train in the world this process finds itself in, and return the summary of the run.

    The world is torch's default process group if there is one, else what torchrun, srun or mpirun have left in the
    environment, else this process alone. Every rank must call it; all get the same summary. SIGTERM, SIGINT, SIGHUP
    and SIGUSR1 end the run early: a checkpoint is written, and the summary's status is "stopped".

    output: the run folder; a new one under runs/ by default. grid: rows x columns, such as "2x4". resume: go on with
    the run in `output`. plan: the text of the plan the run follows, saved with it.

    Raises:
        MegabatchError: a mistake in the settings, the data, the folder or the launcher, in one line.
    """
    if resume and output is None:
        raise CheckpointError("resuming needs to know which run to go on with; give the run folder as output")
    import torch

    request = TrainRequest(config, Path(output) if output else None, grid, resume, plan=plan)
    num_threads = torch.get_num_threads()
    try:
        summary, _ = _train_in(present_world() or read_world(os.environ) or ALONE, request)
    finally:
        torch.set_num_threads(num_threads)
    return summary


def train_here(request: TrainRequest, workers: int | None, environ: Mapping[str, str]) -> int:
    """Train in the world a launcher has made, or in local workers; returns the exit code of the command."""
    if request.resume and request.output is None:
        raise CheckpointError(
            "--resume needs to know which run to go on with; add --output RUN, or type: megabatch train --resume RUN"
        )
    world = read_world(environ, alone=workers is not None)
    if request.elastic is not None:
        world_size = workers or (num_accelerators() if world is None else 0) or 1
        check_elastic(request, request.elastic, world, world_size, environ)
        return _start_workers(request, world_size)
    if world is None:
        return _start_workers(request, workers or num_accelerators() or 1)
    world.check_size(workers)
    return run_as_worker(lambda: _work(world, request), world, environ, request.debug)


def _start_workers(request: TrainRequest, world_size: int) -> int:
    check_count(world_size)
    is_part = request.elastic is not None and request.elastic.lighthouse  # of a world that only the lighthouse knows
    if request.grid and is_part:
        parse_grid(request.grid)
    else:
        _choose_grid(request.grid, world_size)  # refuse a grid that does not fit before anything is started
    folder = (request.output or default_output(request.name)).absolute()
    if not is_part:
        check_output(folder, request.config, request.resume)
    for line in filter(None, [*request.lines, open_to_others(os.environ)]):
        print(line, flush=True)
    print(f"starting       {world_size} worker{'s' if world_size > 1 else ''}: torch, images, network", flush=True)
    request = replace(request, output=folder, lines=())
    if request.elastic is not None:
        stopped_by = start_elastic(request, request.elastic, world_size)
    else:
        max_restarts = request.config.comm.max_restarts
        stopped_by = start_workers(world_size, _start_work, request, max_restarts=max_restarts)
    # A run that stopped with a checkpoint, or finished after all, ended well. A host that left must come again: whoever
    # started it must not take its part for done, also where it was the last one and the run stopped.
    has_left = is_part and stopped_by in LEAVE_SIGNALS
    ended_well = status_of(folder) in (("finished",) if has_left else ("finished", "stopped"))
    return 128 + stopped_by if stopped_by and not ended_well else 0


def _start_work(request: TrainRequest) -> int:
    """What a local worker does."""
    return train_here(request, None, os.environ)


def _work(world: World, request: TrainRequest) -> int:
    from megabatch.train.metrics import say_result

    if world.is_main:
        for line in request.lines:
            print(line)
    summary, folder = _train_in(world, request)
    if world.is_main:
        say_result(summary, folder)
    return 0


def _train_in(world: World, request: TrainRequest) -> tuple[dict[str, Any], Path]:
    """Train on this rank of a world, in a folder that all ranks share the name of."""
    import torch.distributed as dist

    from megabatch.comm.grid import default_grid
    from megabatch.train.components import choose_kernels, set_threads
    from megabatch.train.graph import own_stream
    from megabatch.train.trainer import Trainer
    from megabatch.workers.stop import StopRequest

    config, wanted_grid = request.config, _choose_grid(request.grid, world.size)
    present, wanted = dist.get_backend() if dist.is_initialized() else "", config.comm.backend
    if present and wanted not in ("auto", present):
        raise LaunchError(
            f"comm.backend is '{wanted}' but the process group that is there uses '{present}'; make them agree"
        )
    device, backend = choose_device(present or wanted, world)
    set_threads(config, world.local_size)
    choose_kernels(config, device)
    joined = nullcontext() if dist.is_initialized() else join(world, backend, config.comm.timeout_seconds, device)
    passes = own_stream(device) if config.train.cuda_graph and device.type == "cuda" else nullcontext()
    with joined as meeting, passes, StopRequest().listening() as stop:
        world = meeting.world if meeting else world
        folder = _common_folder(request, world, meeting)
        grid = wanted_grid or default_grid(config.comm.timeout_seconds)
        resume = request.resume or world.attempt > 0
        summary = Trainer(config, world, device, folder, grid, stop, resume=resume, plan=request.plan).run()
    return summary, folder


def _choose_grid(text: str | None, world_size: int) -> GridShape | None:
    """The grid that was asked for, if it fits. Without one the hosts decide, when the ranks have joined."""
    shape = parse_grid(text) if text else None
    if shape is not None:
        shape.check_fits(world_size)
    return shape


def _common_folder(request: TrainRequest, world: World, meeting: Meeting | None) -> Path:
    """The run folder, the same on every rank: what the main rank was given, else a new one under runs/."""
    from megabatch.comm.messages import broadcast

    chosen = on_main_rank(world.is_main, lambda: (request.output or _new_folder(request, meeting)).absolute())
    return Path(broadcast(str(chosen), str))


def _new_folder(request: TrainRequest, meeting: Meeting | None) -> Path:
    """A new folder under runs/; after a restart by torchrun the one of before, whose name waits in the store.

    Anybody who reaches the store can write there, so the name is taken only when it is signed with the token of the
    run, and even then it is a name under runs/ and no path.
    """
    if meeting is None:
        return default_output(request.name)
    key = "run folder"
    if meeting.world.attempt > 0 and meeting.store.check([key]):
        signature, _, name = meeting.store.get(key).decode(errors="replace").partition(" ")
        if not (is_signed(meeting.token, name, signature) and is_default_output(name, request.name)):
            raise LaunchError(
                "the store of the launcher holds a run folder that this run did not write: somebody else uses it; "
                f"set {TOKEN_VARIABLE} on every worker, or give --output"
            )
        return Path("runs") / name
    folder = default_output(request.name)
    meeting.store.set(key, f"{sign(meeting.token, folder.name)} {folder.name}")
    return folder
