"""A recipe leaves the same bits behind on any number of workers, by any algorithm, resumed on another number or not."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from benchmarks.exact_bits import Case, left_behind, verdict
from megabatch.train.card import ModelCard, read_card
from tests.system.runs import losses_of, rows_of, train_on_ranks

# Two ghosts a step at first, fewer than three workers: one goes along without a ghost batch. Then five, then six.
SETTINGS = ("train.max_steps=20", "train.global_batch_size=0:16 0.3:40 1:48", "optimizer.lr=0.05")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    train_on_ranks(1, folder, *SETTINGS)
    return folder


@pytest.mark.parametrize(
    ("worlds", "algorithm"), [((2,), "ring"), ((3,), "torus"), ((3,), "backend"), ((2, 3), "torus"), ((3, 1), "ring")]
)
def test_all_that_a_run_leaves_behind_has_the_same_bits(
    alone: Path, tmp_path: Path, worlds: tuple[int, ...], algorithm: str
) -> None:
    """Weights, optimizer, statistics, shifts, evaluation, losses and gradient norms; step 10 ends one of two worlds."""
    folder = tmp_path / "run"
    for part, world_size in enumerate(worlds, start=1):
        settings = (*SETTINGS, f"comm.algorithm={algorithm}", f"train.max_steps={20 * part // len(worlds)}")
        train_on_ranks(world_size, folder, *settings, resume=part > 1)
    case, found = Case("demo", worlds, algorithm), left_behind(folder)
    assert verdict(case, found, left_behind(alone)) == "equal"
    assert len(losses_of(folder)) == 20


def test_augmentation_does_not_depend_on_workers_processes_or_resuming(tmp_path: Path) -> None:
    """Operations, boxes and mixtures within a ghost batch; the audit computes one of them again on every rank."""
    changes = ("data.augment.policy=rand", "data.augment.mixup=0.2", "data.augment.cutmix=1", "data.augment.erase=0.25")
    settings = (*SETTINGS, *changes, "train.audit_every_steps=5")
    train_on_ranks(1, tmp_path / "1", *settings)
    for world_size in (2, 3):
        folder = tmp_path / str(world_size)
        train_on_ranks(world_size, folder, *settings, "data.loader_processes=1", "train.max_steps=11")
        train_on_ranks(world_size, folder, *settings, resume=True)
        case = Case("demo", (world_size,))
        assert verdict(case, left_behind(folder), left_behind(tmp_path / "1")) == "equal"
    train_on_ranks(1, tmp_path / "plain", *SETTINGS)
    assert losses_of(tmp_path / "plain") != losses_of(tmp_path / "1")


def test_model_files_of_equal_runs_are_equal(alone: Path, tmp_path: Path) -> None:
    """Also the card in their metadata: nothing depends on the order of a hash table, on ranks or on time."""
    files = [alone / "model.safetensors"]
    for number, world_size in enumerate((1, 2)):
        train_on_ranks(world_size, tmp_path / str(number), *SETTINGS)
        files.append(tmp_path / str(number) / "model.safetensors")
    assert len({hashlib.sha256(file.read_bytes()).hexdigest() for file in files}) == 1
    with safe_open(files[0], "pt") as file:
        assert ModelCard.model_validate_json(file.metadata()["megabatch"]) == read_card(alone)


def test_a_difference_would_be_seen(alone: Path, tmp_path: Path) -> None:
    train_on_ranks(2, tmp_path / "run", *SETTINGS, "comm.sums=float")
    found, wanted = left_behind(tmp_path / "run"), left_behind(alone)
    outcome = verdict(Case("demo", (2,)), found, wanted)
    assert outcome.startswith("DIFFERENT: weights, model, optimizer, statistics, exact, rows")
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(alone), rel=1e-4)  # the same up to rounding
    ours, theirs = load_file(tmp_path / "run" / "model.safetensors"), load_file(alone / "model.safetensors")
    for name, value in theirs.items():
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
    assert losses_of(tmp_path / "3") == losses_of(tmp_path / "1")
