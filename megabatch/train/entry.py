"""From checked settings to a running worker: starts local workers, or joins those a launcher has started."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabatch.comm.shape import GridShape, near_square, parse_grid
from megabatch.config import Config
from megabatch.errors import CheckpointError, LaunchError
from megabatch.recipes import load_config
from megabatch.recipes.scale import scaling_lines
from megabatch.train.folder import check_output, default_output
from megabatch.train.launch import start_workers
from megabatch.train.worker import run_as_worker
from megabatch.train.world import World, choose_device, join, num_accelerators, read_world

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["TrainRequest", "train_here"]


@dataclass(frozen=True)
class TrainRequest:
    """What the user typed after `megabatch train`."""

    recipe: str
    overrides: tuple[str, ...] = ()
    workers: int | None = None
    grid: str | None = None
    output: Path | None = None
    resume: bool = False
    debug: bool = False
    scale: str | None = None
    epochs: float | None = None
    plan: str = ""  # the text of the plan it follows, whose settings are among the overrides

    def arguments(self, resolved_recipe: Path, folder: Path) -> list[str]:
        """The command line of a worker that does the same, from settings already resolved, in this folder."""
        words = ["train", str(resolved_recipe), "--output", str(folder)]
        words += ["--grid", self.grid] if self.grid else []
        words += ["--keep-plan", str(resolved_recipe.with_name("plan.json"))] if self.plan else []
        words += ["--resume"] * self.resume + ["--debug"] * self.debug
        return words


def train_here(request: TrainRequest, environ: Mapping[str, str]) -> int:
    """Train in the world this process finds itself in, or start one; returns the exit code of the command."""
    config = load_config(request.recipe, list(request.overrides), scale=request.scale, epochs=request.epochs)
    if request.resume and request.output is None:
        raise CheckpointError("--resume needs to know which run to go on with; add --output RUN_FOLDER")
    world = read_world(environ, alone=request.workers is not None)
    if world is None:
        return _start_workers(request, config)
    if request.workers not in (None, world.size):
        raise LaunchError(
            f"--workers {request.workers} was given but {world.launcher} started {world.size}; "
            "leave --workers out, or make them agree"
        )
    return run_as_worker(lambda: _join_and_train(request, config, world), world, environ, request.debug)


def _start_workers(request: TrainRequest, config: Config) -> int:
    world_size = request.workers or num_accelerators() or 1
    _choose_grid(request.grid, world_size)  # refuse a grid that does not fit before anything is started
    folder = (request.output or default_output(request.recipe)).absolute()
    check_output(folder, config, request.resume)
    _say_scale(request, config)
    with tempfile.TemporaryDirectory(prefix="megabatch-") as scratch:
        # Workers that are restarted later must not see what has become of the recipe file meanwhile.
        resolved = Path(scratch) / "recipe.toml"
        resolved.write_text(config.to_toml(), encoding="utf-8")
        if request.plan:
            resolved.with_name("plan.json").write_text(request.plan, encoding="utf-8")
        stopped_by = start_workers(world_size, request.arguments(resolved, folder), config.comm.max_restarts)
    ended_well = (folder / "summary.json").is_file()  # stopped with a checkpoint, or finished after all
    return 128 + stopped_by if stopped_by and not ended_well else 0


def _join_and_train(request: TrainRequest, config: Config, world: World) -> int:
    from megabatch.train.build import set_threads
    from megabatch.train.engine import train

    if world.is_main:
        _say_scale(request, config)
    device, backend = choose_device(config.comm.backend, world)
    set_threads(config, world.local_size)
    with join(world, backend, config.comm.timeout_seconds) as store:
        folder = _agree_on_folder(request, world, store)
        grid = _choose_grid(request.grid, world.size)
        resume = request.resume or world.attempt > 0
        summary = train(config, world, device, folder, grid, resume, request.plan)
    if world.is_main:
        _say_result(summary, folder)
    return 0


def _say_scale(request: TrainRequest, config: Config) -> None:
    if request.scale is not None:
        for line in scaling_lines(load_config(request.recipe, epochs=request.epochs), config):
            print(line)


def _choose_grid(text: str | None, world_size: int) -> GridShape:
    shape = parse_grid(text) if text else near_square(world_size)
    shape.check_fits(world_size)
    return shape


def _agree_on_folder(request: TrainRequest, world: World, store: Store) -> Path:
    """Every worker takes the folder the main rank chose, also after a restart by torchrun."""
    key = "megabatch-run-folder"
    if world.is_main:
        wanted = (request.output or default_output(request.recipe)).absolute()
        store.compare_set(key, "", str(wanted))
    return Path(store.get(key).decode())


def _say_result(summary: dict[str, Any], folder: Path) -> None:
    if summary["status"] == "stopped":
        print(f"stopped by {summary['stopped_by']} after step {summary['steps']}, checkpoint written")
        print(f"go on with     megabatch train ... --output {folder} --resume")
        return
    hits = f"top-1 {summary['top1']:.2%}, top-5 {summary['top5']:.2%}"
    print(f"accuracy       {hits} of {summary['val_images']:,} images")
    print(
        f"time           {summary['training_seconds']:.1f} s of training, {summary['steps']:,} steps, "
        f"{summary['images_per_second']:,.0f} images/s on {summary['workers']} workers"
    )
    print(f"run folder     {folder}")
