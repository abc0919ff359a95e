"""`megabatch.train`: alone, in a process group that is already there, and what it refuses."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

import megabatch
from megabatch.errors import CheckpointError, GridError
from tests.ranks import run_ranks
from tests.system.runs import clean_environment, small_config, train_on_ranks

SHORT = ("train.max_steps=3",)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)


def test_alone_it_trains_in_this_process_and_leaves_no_trace(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    summary = megabatch.train(small_config(*SHORT), output=tmp_path / "run")
    assert (summary["status"], summary["steps"], summary["workers"]) == ("finished", 3, 1)
    assert not dist.is_initialized()
    assert signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(CheckpointError, match="already holds a run"):
        megabatch.train(small_config(*SHORT), output=tmp_path / "run")
    longer = small_config("train.max_steps=5")
    assert megabatch.train(longer, output=str(tmp_path / "run"), resume=True)["steps"] == 5


def train_in_group(rank: int, folder: str) -> dict[str, Any]:
    summary = megabatch.train(small_config(*SHORT), output=folder if rank == 0 else "elsewhere", grid="1x3")
    assert dist.is_initialized()  # the group is the caller's
    return summary


def test_a_group_that_is_there_is_used_and_left_alone(tmp_path: Path) -> None:
    summaries = run_ranks(3, train_in_group, str(tmp_path / "own"))
    assert [one["steps"] for one in summaries] == [3, 3, 3]
    assert summaries[0]["top1"] == summaries[2]["top1"]
    train_on_ranks(3, tmp_path / "ours", *SHORT)
    own, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("own", "ours"))
    assert all(own[name].equal(ours[name]) for name in ours)


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="give the run folder as output"):
        megabatch.train(small_config(), resume=True)
    with pytest.raises(GridError, match="2x2 needs 4"):
        megabatch.train(small_config(), output=tmp_path / "run", grid="2x2")
    assert not (tmp_path / "run").exists()
