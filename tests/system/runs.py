"""Small whole runs for the system tests: generated images, a tiny residual net, seconds of work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.small_run import SMALL_RUN
from megabatch.comm.shape import near_square
from megabatch.config import Config
from megabatch.recipes import load_config
from megabatch.train.checkpoint import decode, read_whole
from megabatch.train.trainer import Trainer
from megabatch.workers.stop import StopRequest
from megabatch.workers.world import World
from tests.ranks import run_ranks

REPOSITORY = Path(__file__).resolve().parents[2]

SMALL = (*SMALL_RUN, "train.evaluate_every_epochs=0", "checkpoint.every_epochs=0")


def small_config(*overrides: str) -> Config:
    foreign = any(override.startswith("model.name=") for override in overrides)
    base = [setting for setting in SMALL if not (foreign and setting.startswith("model.width"))]
    return load_config("demo", [*base, *overrides])


def train_on_ranks(world_size: int, folder: Path, *overrides: str, resume: bool = False) -> dict[str, Any]:
    """Train the small recipe on real ranks and return rank 0's summary."""
    return run_ranks(world_size, train_one, world_size, str(folder), overrides, resume, timeout_seconds=200)[0]


def train_one(rank: int, world_size: int, folder: str, overrides: tuple[str, ...], resume: bool) -> dict[str, Any]:
    world = World(rank, world_size, rank, world_size, "torchrun", "127.0.0.1", 0)
    config = small_config(*overrides)
    grid, device = near_square(world_size), torch.device("cpu")
    with StopRequest().listening() as stop:
        return Trainer(config, world, device, Path(folder), grid, stop, resume=resume).run()


def read_checkpoint(path: Path) -> dict[str, Any]:
    return decode(read_whole(path), str(path))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses_of(folder: Path) -> list[float]:
    return [row["loss"] for row in rows_of(folder)]


def command(folder: Path, *words: str, overrides: tuple[str, ...] = ()) -> list[str]:
    """`python -m megabatch train demo ...` of the small recipe."""
    settings = [word for setting in (*SMALL, *overrides) for word in ("--set", setting)]
    return [sys.executable, "-m", "megabatch", "train", "demo", "--output", str(folder), *settings, *words]


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment of a user's shell: nothing of a launcher, nothing that pytest added."""
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith((*launchers, "MEGABATCH_LAUNCHED"))}
    return kept | {"OMP_NUM_THREADS": "1"} | extra


def start(words: list[str], **extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        cwd=REPOSITORY,
        env=clean_environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
