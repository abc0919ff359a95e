"""What a rank trains with gives back what it took: threads and process groups."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import megabatch
from megabatch.errors import ConfigError
from megabatch.train.components import Normaliser
from tests.ranks import run_ranks
from tests.system.runs import small_config


def groups_and_threads() -> tuple[int, int]:
    bucket_threads = [thread for thread in threading.enumerate() if thread.name.startswith("megabatch")]
    return len(dist.distributed_c10d._world.pg_map), len(bucket_threads)


def train_twice(rank: int, folder: str) -> list[tuple[int, int]]:
    config = small_config("train.max_steps=3", "comm.algorithm=torus")
    found = [groups_and_threads()]
    for number in (1, 2):
        megabatch.train(config, output=f"{folder}/{number}", grid="1x2")
        found.append(groups_and_threads())
    return found


def test_runs_in_a_group_that_is_there_leave_no_groups_and_no_threads_behind(tmp_path: Path) -> None:
    for found in run_ranks(2, train_twice, str(tmp_path)):
        assert found == [(1, 0)] * 3


def test_means_must_fit_the_channels_of_the_images() -> None:
    with pytest.raises(ConfigError, match=r"data\.mean has 2 values but images have 3 channels"):
        Normaliser(small_config("data.mean=[0.5, 0.5]", "data.std=[0.5, 0.5]"), 3, torch.device("cpu"))
