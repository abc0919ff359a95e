"""Whole runs from tar shards: growing images, loader processes, broken images, a set that changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megabatch.data.formats import open_source
from megabatch.data.verify import verify, write_manifest
from megabatch.errors import DataError
from megabatch.train.feed import open_images
from tests.data.conftest import write_tar
from tests.data.images import encoded, photograph
from tests.system.runs import losses_of, small_config, train_on_ranks


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """60 JPEG images to train on, of which the 13th is empty, and 20 to evaluate."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for split, count in (("train", 60), ("val", 20)):
        members = []
        for i in range(count):
            content = b"" if (split, i) == ("train", 13) else encoded(photograph(24 + i % 5, 30 - i % 7, seed=i))
            members += [(f"{i:03}.jpg", content), (f"{i:03}.cls", b"%d" % (i % 4))]
        write_tar(folder / f"{split}-0.tar", members)
    return folder


def settings(shards: Path) -> tuple[str, ...]:
    return (
        "data.source=tar",
        f'data.path="{shards}"',
        "data.image_size=16",
        "data.mean=[0.5,0.5,0.5]",
        "data.std=[0.25,0.25,0.25]",
        "data.augment.crop=resized",
        "data.augment.brightness=0.2",
        "data.train_image_size=[{until_epoch=1, start=16}, {until_epoch=2, start=24}]",
        "train.epochs=2",
        "train.global_batch_size=16",
        "train.ghost_batch_size=8",
    )


def test_loader_processes_do_not_change_a_run_and_broken_images_are_listed(shards: Path, tmp_path: Path) -> None:
    summary: dict[str, Any] = train_on_ranks(2, tmp_path / "threads", *settings(shards))
    assert summary["status"] == "finished"
    assert summary["broken_images"] == 2  # once an epoch, whoever meets it
    listed = list((tmp_path / "threads").glob("broken.*.jsonl"))
    names = {json.loads(line)["name"] for path in listed for line in path.read_text().splitlines()}
    assert names == {f"013.jpg in {shards / 'train-0.tar'}"}
    train_on_ranks(2, tmp_path / "processes", *settings(shards), "data.loader_processes=2")
    assert losses_of(tmp_path / "processes") == losses_of(tmp_path / "threads")


def test_exact_statistics_pass_over_broken_images(shards: Path, tmp_path: Path) -> None:
    exact = ("norm.exact_batches=16", "train.max_steps=1")  # of 8 images each: the whole set and more
    assert train_on_ranks(1, tmp_path / "run", *settings(shards), *exact)["status"] == "finished"


def test_none_tolerated_stops_the_run_by_name(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"cannot decode the image 013.jpg in .*train-0.tar"):
        train_on_ranks(1, tmp_path / "run", *settings(shards), "data.max_broken_share=0")


def test_a_set_that_is_not_as_verified_is_refused_at_the_start(shards: Path) -> None:
    source = open_source("tar", shards, "val", memory_limit_bytes=0)
    write_manifest("tar", shards, "val", source, verify(source, 1))
    config = small_config(*settings(shards))
    open_images(config)
    content = (shards / "val-0.tar").read_bytes()
    (shards / "val-0.tar").write_bytes(content[:-1] + b"x")
    with pytest.raises(DataError, match=r"checksum of the ends of val-0.tar differs"):
        open_images(config)
