"""Checkpoints are written in the background: no step waits for the disk, and no kill loses what was announced."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megabatch.errors import WriteError
from megabatch.files import write_atomically
from tests.ranks import RankFailureError, run_ranks
from tests.system.runs import REPOSITORY, clean_environment, read_checkpoint, rows_of, train_on_ranks, train_one

EVERY_STEP = ("train.max_steps=8", "checkpoint.every_steps=1")


def train_on_a_slow_disk(rank: int, folder: str) -> dict[str, Any]:
    """The disk takes the first checkpoint only when all steps are done."""

    def write(path: Path, content: bytes | str, *, durable: bool = True) -> None:
        deadline = time.monotonic() + 100
        while len(rows_of(Path(folder))) < 8:
            assert time.monotonic() < deadline, "the steps wait for the disk"
            time.sleep(0.05)
        write_atomically(path, content, durable=durable)

    pytest.MonkeyPatch().setattr("megabatch.train.checkpoint.write_atomically", write)
    return train_one(rank, 2, folder, EVERY_STEP, False)


def test_no_step_waits_for_the_disk_and_everything_is_written_before_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run_ranks(2, train_on_a_slow_disk, str(folder), timeout_seconds=200)[0]["steps"] == 8
    assert [path.name for path in sorted((folder / "checkpoints").glob("step-*.pt"))] == [
        "step-00000001.pt",  # was being written; the others but the last one were replaced while they waited
        "step-00000008.pt",
    ]
    first = read_checkpoint(folder / "checkpoints" / "step-00000001.pt")
    assert first["run"]["clock"]["steps"] == 1
    assert first["metrics_bytes"] == len((folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)[0])
    # It holds the state after step 1, though seven more steps were made before it was written.
    train_on_ranks(1, tmp_path / "short", "train.max_steps=1")
    short = read_checkpoint(tmp_path / "short" / "checkpoints" / "last")
    assert all(short["model"][name].equal(tensor) for name, tensor in first["model"].items())
    momenta = [state["momentum_buffer"] for state in first["optimizer"]["state"].values()]
    assert all(
        state["momentum_buffer"].equal(momentum)
        for state, momentum in zip(short["optimizer"]["state"].values(), momenta, strict=True)
    )


def train_on_a_full_disk(rank: int, folder: str) -> None:
    def write(path: Path, content: bytes | str, *, durable: bool = True) -> None:
        raise WriteError(f"'{path}' cannot be written: No space left on device; make room there")

    pytest.MonkeyPatch().setattr("megabatch.train.checkpoint.write_atomically", write)
    train_one(rank, 1, folder, ("train.epochs=400", "checkpoint.every_steps=2"), False)


def test_a_full_disk_ends_the_run_with_one_line_soon_after(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(RankFailureError, match=r"WriteError: .*sha256' cannot be written: No space left on device"):
        run_ranks(1, train_on_a_full_disk, str(folder), timeout_seconds=200)
    assert not (folder / "summary.json").exists()
    assert 2 <= len(rows_of(folder)) < 1000  # of 3,300


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("before the checksum", marks=pytest.mark.slow),
        "half a checkpoint",
        pytest.param("before the link", marks=pytest.mark.slow),
    ],
)
def test_a_kill_in_the_middle_of_a_background_write_loses_nothing_that_was_there(moment: str, tmp_path: Path) -> None:
    """Step 2 is on disk when the next one is written that was not replaced; the kill comes then."""
    folder = tmp_path / "run"
    code = f"""
import os, signal
from pathlib import Path
from megabatch.train import checkpoint
from tests.ranks import run_ranks
from tests.system.runs import train_one

real_write, real_link = checkpoint.write_atomically, checkpoint.link_atomically

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def write(path, content):
    if "00000002" not in path.name:
        if {moment!r} == "before the checksum":
            kill()
        if {moment!r} == "half a checkpoint" and path.suffix == ".pt":
            path.with_name("." + path.name + ".00.part").write_bytes(content[: len(content) // 2])
            kill()
    real_write(path, content)

def link(path, target):
    if "00000002" not in target:
        kill()
    real_link(path, target)

checkpoint.write_atomically, checkpoint.link_atomically = write, link
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
train_one(0, 1, {str(folder)!r}, ("train.max_steps=8", "checkpoint.every_steps=2"), False)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env=clean_environment(PYTHONPATH=str(REPOSITORY)),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    whole = [read_checkpoint(path) for path in sorted((folder / "checkpoints").glob("step-*.pt"))]
    assert whole[0]["run"]["clock"]["steps"] == 2
    assert len(whole) == (2 if moment == "before the link" else 1)
    train_on_ranks(1, folder, "train.max_steps=8", "checkpoint.every_steps=2", resume=True)
    train_on_ranks(1, tmp_path / "whole", "train.max_steps=8")
    assert [row["step"] for row in rows_of(folder)] == list(range(1, 9))
    weights = [(run / "model.safetensors").read_bytes() for run in (folder, tmp_path / "whole")]
    assert weights[0] == weights[1]
    assert not list((folder / "checkpoints").glob(".step-*.part"))
