"""A recipe is the same computation on any number of workers, up to summation order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.system.runs import losses_of, rows_of, train_on_ranks

# Two ghosts a step at first, fewer than three workers: one goes along without a ghost batch. Then five, then six.
SETTINGS = ("train.max_steps=20", "train.global_batch_size=0:16 0.3:40 1:48", "optimizer.lr=0.05")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    train_on_ranks(1, folder, *SETTINGS)
    return folder


def test_losses_and_weights_of_three_workers_agree_with_one(alone: Path, tmp_path: Path) -> None:
    """The step itself has an oracle in tests/train/test_step.py; here loader, statistics and saved weights join it."""
    folder = tmp_path / "run"
    train_on_ranks(3, folder, *SETTINGS)
    assert len(losses_of(folder)) == 20
    assert losses_of(folder) == pytest.approx(losses_of(alone), rel=1e-4)
    ours, theirs = load_file(folder / "model.safetensors"), load_file(alone / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        # Running statistics are part of it: they must not depend on which worker saw which ghost batch.
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_clock_counts_samples_through_a_change_of_batch(alone: Path) -> None:
    rows = rows_of(alone)
    # 112 images: past epoch 0.3; 352 of 330: past epoch 1.
    assert [row["global_batch_size"] for row in rows] == [16] * 7 + [40] * 6 + [48] * 7
    seen = 0
    for number, row in enumerate(rows, start=1):
        seen += row["global_batch_size"]
        assert (row["step"], row["samples"], row["epoch"]) == (number, seen, pytest.approx(seen / 330))


def test_the_last_step_is_cut_to_whole_ghosts(tmp_path: Path) -> None:
    summary = train_on_ranks(2, tmp_path / "run", "train.epochs=1", "train.global_batch_size=64")
    rows = rows_of(tmp_path / "run")
    assert [row["global_batch_size"] for row in rows] == [64] * 5 + [8]  # 330 = 5 * 64 + 8 + 2 left over
    assert (summary["status"], summary["samples"]) == ("finished", 328)


def test_dropout_belongs_to_the_ghost_batch_size(tmp_path: Path) -> None:
    settings = ("model.name=tests.system.models:tiny", "model.zero_gamma=none", "train.max_steps=8")
    for world_size in (1, 3):
        train_on_ranks(world_size, tmp_path / str(world_size), *settings)
    assert losses_of(tmp_path / "3") == pytest.approx(losses_of(tmp_path / "1"), rel=1e-4)
