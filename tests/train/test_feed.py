"""What the settings say about feeding a rank."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megabatch.config import Config
from megabatch.data.batches import Broken
from megabatch.data.decode import Decoding
from megabatch.data.formats import open_source
from megabatch.data.sources import ImageArray
from megabatch.errors import ConfigError
from megabatch.machine import usable_cores
from megabatch.recipes import load_config
from megabatch.train.feed import Feeds, feeding_of, image_size_at, largest_image_size
from tests.ranks import run_ranks


def settings(*overrides: str) -> Config:
    return load_config("demo", list(overrides))


def in_memory() -> ImageArray:
    return ImageArray("memory", np.zeros((4, 8, 8, 3), dtype=np.uint8), [0, 1, 0, 1])


def test_settings_reach_the_loader(tmp_path: Path) -> None:
    wanted = ("data.loader_threads=3", "data.loader_processes=2", "data.decoder=pillow", "data.reduce_jpeg=true")
    feeding = feeding_of(settings(*wanted, "data.max_broken_share=0.25"), in_memory(), 1, tmp_path / "b")
    assert (feeding.threads, feeding.processes) == (3, 2)
    assert feeding.decoding == Decoding("pillow", reduce=True)
    assert feeding.broken.max_share == 0.25


def test_cores_are_shared_and_images_in_memory_need_one_thread() -> None:
    lazy = open_source("generated", None, "train", num_images=9, memory_limit_bytes=0)
    assert feeding_of(settings(), lazy, 1).threads == min(16, usable_cores())
    assert feeding_of(settings(), lazy, 10_000).threads == 1
    assert feeding_of(settings(), in_memory(), 1).threads == 1


def test_a_decoder_that_is_missing_is_said_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(ConfigError, match=r"pip install 'megabatch\[opencv\]'"):
        feeding_of(settings("data.decoder=opencv"), in_memory(), 1)


def test_the_size_of_images_follows_its_schedule() -> None:
    assert image_size_at(settings("data.image_size=28"))(3.0) == 28
    assert largest_image_size(settings("data.image_size=28")) == 28
    pieces = "[{until_epoch=2, start=128}, {until_epoch=6, shape='linear', start=128, end=192}]"
    growing = settings(f"data.train_image_size={pieces}")
    assert [image_size_at(growing)(epoch) for epoch in (0, 1.99, 2, 4, 5.9, 6, 50)] == [
        128,
        128,
        128,
        160,
        192,
        192,
        192,
    ]
    assert largest_image_size(growing) == 192
    assert [
        image_size_at(settings("data.train_image_size=100"))(0.0),
        largest_image_size(settings("data.train_image_size=100")),
    ] == [96, 96]
    with pytest.raises(ConfigError, match=r"data.train_image_size must have rising"):
        settings("data.train_image_size=[{until_epoch=2, start=64}, {until_epoch=1, start=96}]")


def count_broken(rank: int, folder: str) -> tuple[int, list[str]]:
    size = torch.distributed.get_world_size()
    feeds = Feeds(settings(), size, Path(folder) / f"broken.{rank}.jsonl", in_memory(), in_memory())
    feeds.train.broken.note(10, [Broken(i, "x", "y") for i in range(rank + 1)])
    feeds.val.broken.note(10, [Broken(7, "x", "y")])
    total = feeds.total_broken(torch.device("cpu"))
    torch.distributed.barrier()
    return total, sorted(path.name for path in Path(folder).iterdir())


def test_broken_images_of_all_workers_are_added_up(tmp_path: Path) -> None:
    for total, names in run_ranks(2, count_broken, str(tmp_path)):
        assert total == 1 + 2 + 2
        assert names == ["broken.0.jsonl", "broken.1.jsonl"]
