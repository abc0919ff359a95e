"""An interrupted run, resumed, is the run that was never interrupted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megabatch.errors import CheckpointError
from tests.ranks import RankFailureError
from tests.system.runs import SMALL, losses_of, rows_of, train_on_ranks

WHOLE = "train.max_steps=12"
HALF = "train.max_steps=7"  # in the middle of the first epoch
BATCH = "train.global_batch_size=0:40 0.6:48"
CHECKPOINTS = "checkpoint.every_steps=2"


Halves = tuple[int, Path, Path]


def run_whole_and_half(world_size: int, base: Path) -> Halves:
    train_on_ranks(world_size, base / "whole", WHOLE, BATCH, CHECKPOINTS)
    train_on_ranks(world_size, base / "half", HALF, BATCH, CHECKPOINTS)
    return world_size, base / "whole", base / "half"


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Halves:
    """A whole run and the first half of the same run, on 2 workers."""
    return run_whole_and_half(2, tmp_path_factory.mktemp("resume"))


@pytest.fixture(scope="module")
def halves_of_3(tmp_path_factory: pytest.TempPathFactory) -> Halves:
    return run_whole_and_half(3, tmp_path_factory.mktemp("resume"))


@pytest.mark.parametrize("workers", ["halves", pytest.param("halves_of_3", marks=pytest.mark.slow)])
def test_same_worker_count_is_bit_identical(workers: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    world_size, whole, half = request.getfixturevalue(workers)
    folder = Path(shutil.copytree(half, tmp_path / "run", symlinks=True))
    assert len(rows_of(folder)) == 7
    train_on_ranks(world_size, folder, WHOLE, BATCH, CHECKPOINTS, resume=True)
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert losses_of(folder) == losses_of(whole)
    ours, theirs = (json.loads((run / "summary.json").read_text()) for run in (folder, whole))
    assert ours["wall_seconds"] > json.loads((half / "summary.json").read_text())["wall_seconds"]
    assert ours["best_top1"] >= theirs["best_top1"]  # the half run was evaluated once more
    assert (folder / "checkpoints" / "best").exists()


def test_rows_after_the_checkpoint_are_cut_off(halves: Halves, tmp_path: Path) -> None:
    world_size, whole, half = halves
    folder = Path(shutil.copytree(half, tmp_path / "run", symlinks=True))
    # As after a kill: the newest checkpoint is of step 6, the log already has a row 7 and the torn begin of row 8.
    (folder / "checkpoints" / "step-00000007.pt").unlink()
    with open(folder / "metrics.jsonl", "a") as log:
        log.write('{"step": 8, "los')
    train_on_ranks(world_size, folder, WHOLE, BATCH, CHECKPOINTS, resume=True)
    assert [row["step"] for row in rows_of(folder)] == list(range(1, 13))
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_damaged_newest_checkpoint_gives_way_to_the_one_before(halves: Halves, tmp_path: Path) -> None:
    world_size, whole, half = halves
    folder = Path(shutil.copytree(half, tmp_path / "run", symlinks=True))
    newest = folder / "checkpoints" / "step-00000007.pt"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    train_on_ranks(world_size, folder, WHOLE, BATCH, CHECKPOINTS, resume=True)
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.parametrize("workers", ["halves", pytest.param("halves_of_3", marks=pytest.mark.slow)])
def test_another_worker_count_is_bit_identical_too(
    workers: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    world_size, whole, half = request.getfixturevalue(workers)
    folder = Path(shutil.copytree(half, tmp_path / "run", symlinks=True))
    train_on_ranks(4 if world_size == 2 else 1, folder, WHOLE, BATCH, CHECKPOINTS, resume=True)
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert losses_of(folder) == losses_of(whole)


def test_a_finished_run_can_be_resumed_to_no_effect(halves: Halves, tmp_path: Path) -> None:
    world_size, whole, _ = halves
    folder = Path(shutil.copytree(whole, tmp_path / "run", symlinks=True))
    summary = train_on_ranks(world_size, folder, WHOLE, BATCH, CHECKPOINTS, resume=True)
    assert (summary["status"], summary["steps"]) == ("finished", 12)
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert losses_of(folder) == losses_of(whole)


def test_checkpoint_of_another_model_is_refused_in_one_line(halves: Halves, tmp_path: Path) -> None:
    _, _, half = halves
    folder = tmp_path / "run"
    train_on_ranks(1, folder, "train.max_steps=2", "model.width=12")
    shutil.rmtree(folder / "checkpoints")
    shutil.copytree(half / "checkpoints", folder / "checkpoints", symlinks=True)
    with pytest.raises(RankFailureError, match=f"{CheckpointError.__name__}: run folder .* holds another model: for '"):
        train_on_ranks(1, folder, "train.max_steps=4", "model.width=12", resume=True)


def test_a_best_link_that_was_not_moved_in_time_is_fixed(halves: Halves, tmp_path: Path) -> None:
    world_size, _, half = halves
    folder = Path(shutil.copytree(half, tmp_path / "run", symlinks=True))
    best = (folder / "checkpoints" / "best").resolve().name
    (folder / "checkpoints" / "best").unlink()
    train_on_ranks(world_size, folder, HALF, BATCH, CHECKPOINTS, resume=True)
    assert (folder / "checkpoints" / "best").resolve().name == best


def test_the_folder_alone_is_enough(tmp_path: Path) -> None:
    """`train --resume RUN`: settings, workers and grid are those the run had."""
    settings = [word for setting in SMALL for word in ("--set", setting)]

    def command(*words: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "megabatch", "train", *words],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    for name, steps in (("whole", 6), ("half", 3)):
        places = ("--workers", "2", "--grid", "2x1", "--output", str(tmp_path / name))
        command("demo", *settings, *places, "--set", f"train.max_steps={steps}")
    command("--resume", str(tmp_path / "half"), "--set", "train.max_steps=6")
    whole, half = tmp_path / "whole", tmp_path / "half"
    assert (half / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    environment = json.loads((half / "environment.json").read_text())
    assert (environment["workers"], environment["grid"]) == (2, [2, 1])
