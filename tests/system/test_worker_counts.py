"""A recipe is the same computation on any number of workers, up to summation order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.system.runs import losses_of, rows_of, train_on_ranks

STEPS = 20


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    train_on_ranks(1, folder, f"train.max_steps={STEPS}", "train.global_batch_size=0:40 1:48")
    return folder


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_losses_and_weights_agree_with_one_worker(world_size: int, alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train_on_ranks(world_size, folder, f"train.max_steps={STEPS}", "train.global_batch_size=0:40 1:48")
    assert len(losses_of(folder)) == STEPS
    assert losses_of(folder) == pytest.approx(losses_of(alone), rel=1e-4)
    ours, theirs = load_file(folder / "model.safetensors"), load_file(alone / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        # Running statistics are part of it: they must not depend on which worker saw which ghost batch.
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_clock_counts_samples_through_a_change_of_batch(alone: Path) -> None:
    rows = rows_of(alone)
    assert [row["global_batch_size"] for row in rows[:10]] == [40] * 9 + [48]  # 360 of 330 images seen: past epoch 1
    seen = 0
    for number, row in enumerate(rows, start=1):
        seen += row["global_batch_size"]
        assert (row["step"], row["samples"], row["epoch"]) == (number, seen, pytest.approx(seen / 330))


def test_more_workers_than_ghosts(tmp_path: Path) -> None:
    """A worker without a ghost batch keeps in step and adds nothing."""
    settings = ("train.global_batch_size=16", "train.max_steps=6")
    train_on_ranks(1, tmp_path / "one", *settings)
    train_on_ranks(4, tmp_path / "four", *settings)
    assert losses_of(tmp_path / "four") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-4)
    one, four = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "four"))
    for name, value in one.items():
        torch.testing.assert_close(four[name], value, rtol=1e-3, atol=1e-4, msg=name)


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
