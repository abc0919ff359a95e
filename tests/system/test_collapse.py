"""Branches of a collapsed ensemble: where they start, what they leave behind, and that they survive interruptions."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from megabatch.errors import CheckpointError
from megabatch.model.weights import read_weights
from megabatch.use.evaluate import evaluate_ensemble, evaluate_run
from tests.system.runs import command, losses_of, rows_of, start, train_on_ranks

# 330 images. Trunk: steps 1-5 to the first cut at epoch 0.5, then 8 more; branches of 4 steps after each part.
TRUNK = ("train.epochs=1.5", "train.reset_momentum_at_epochs=[0.5]", "norm.momentum=1.0")
COLLAPSE = ("collapse.at_epochs=[0.5, 1.5]", "collapse.epochs=0.5", "collapse.weight_decay=2e-3")
CHECKPOINTS = "checkpoint.every_steps=2"
PHASES = ["trunk"] * 5 + ["collapse-1"] * 4 + ["trunk"] * 8 + ["collapse-2"] * 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("collapse") / "run"
    train_on_ranks(2, folder, *TRUNK, *COLLAPSE, CHECKPOINTS)
    return folder


def test_phases_rates_and_accounting(whole: Path) -> None:
    rows = rows_of(whole)
    assert [row["phase"] for row in rows] == PHASES
    assert [row["step"] for row in rows] == list(range(1, 22))
    assert [row["global_batch_size"] for row in rows[:17]] == [40] * 16 + [8]
    assert rows[-1]["samples"] == sum(row["global_batch_size"] for row in rows) == 488 + 2 * 160
    epochs = [row["epoch"] for row in rows]
    assert epochs[4] == pytest.approx(200 / 330)
    assert epochs[8] == pytest.approx((200 + 160) / 330)  # the branch counts on ...
    assert epochs[9] == pytest.approx((200 + 40) / 330)  # ... and the trunk goes on from where it was left
    # From the trunk's rate to 0 with power 2, over the branch's own 0.5 epochs; 40 images are a share of 40 / 165.
    expected = [0.2 * (1 - n * 40 / 165) ** 2 for n in range(4)]
    assert [row["lr"] for row in rows[5:9]] == pytest.approx(expected)
    assert {row["lr"] for row in rows[9:17]} == {0.2}
    assert {row["weight_decay"] for row in rows if row["phase"] == "trunk"} == {5e-4}
    assert {row["weight_decay"] for row in rows if row["phase"] != "trunk"} == {2e-3}


def test_the_summary_names_the_members_and_the_model_is_the_last_one(whole: Path) -> None:
    summary = json.loads((whole / "summary.json").read_text())
    rows = rows_of(whole)
    assert [one["file"] for one in summary["members"]] == [f"members/member-{k}.safetensors" for k in (1, 2)]
    assert [one["top1"] for one in summary["members"]] == [rows[8]["val_top1"], rows[20]["val_top1"]]
    assert (summary["top1"], summary["trunk_top1"]) == (rows[20]["val_top1"], rows[16]["val_top1"])
    assert (summary["steps"], summary["samples"], summary["status"]) == (21, 808, "finished")
    last, model = (read_weights(whole / name) for name in ("members/member-2.safetensors", "model.safetensors"))
    assert model.keys() == last.keys()
    assert all(torch.equal(model[name], value) for name, value in last.items())


def test_the_trunk_does_not_notice_its_branches(whole: Path, tmp_path: Path) -> None:
    train_on_ranks(2, tmp_path / "trunk", *TRUNK, CHECKPOINTS)
    assert losses_of(tmp_path / "trunk") == [row["loss"] for row in rows_of(whole) if row["phase"] == "trunk"]


def test_interrupted_anywhere_it_is_the_same_run(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    # In the trunk, at a branch's start, inside a branch, at its end, in the trunk again, inside the last branch.
    for position, limit in enumerate((3, 5, 7, 9, 12, 19, 0)):
        settings = (*TRUNK, *COLLAPSE, CHECKPOINTS, f"train.max_steps={limit}")
        train_on_ranks(2, folder, *settings, resume=position > 0)
    assert losses_of(folder) == losses_of(whole)
    for name in ("members/member-1.safetensors", "members/member-2.safetensors", "model.safetensors"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes(), name
    ours, theirs = (json.loads((run / "summary.json").read_text()) for run in (folder, whole))
    assert ours["members"] == theirs["members"]


@pytest.mark.slow
def test_members_do_not_depend_on_the_number_of_workers(whole: Path, tmp_path: Path) -> None:
    train_on_ranks(3, tmp_path / "three", *TRUNK, *COLLAPSE, CHECKPOINTS)
    assert losses_of(tmp_path / "three") == losses_of(whole)
    for name in ("members/member-1.safetensors", "members/member-2.safetensors", "model.safetensors"):
        assert (tmp_path / "three" / name).read_bytes() == (whole / name).read_bytes(), name


def test_the_ensemble_counts_every_image_once(whole: Path) -> None:
    found = evaluate_ensemble(whole, None)
    assert found is not None
    left = json.loads((whole / "ensemble.json").read_text())
    assert left == found  # what the report shows
    assert found["num_images"] == 103
    summary = json.loads((whole / "summary.json").read_text())
    assert [one["top1"] for one in found["members"]] == [one["top1"] for one in summary["members"]]
    alone = evaluate_run(whole, None)
    assert alone is not None
    assert found["members"][-1]["top1"] == alone["top1"]
    # Jensen: the loss of averaged probabilities is at most the average loss.
    assert found["ensemble"]["loss"] <= sum(one["loss"] for one in found["members"]) / 2
    assert 0.0 <= found["weight_average"]["top1"] <= 1.0


def test_a_run_without_members_has_no_ensemble(tmp_path: Path) -> None:
    train_on_ranks(1, tmp_path / "run", "train.max_steps=2")
    with pytest.raises(CheckpointError, match="has no members"):
        evaluate_ensemble(tmp_path / "run", None)


def _kill_in(phase: str, folder: Path, words: list[str]) -> None:
    """Start a run and kill it, launcher and workers, as soon as a step of the phase is logged."""
    process = start(words)
    deadline = time.monotonic() + 120
    log = folder / "metrics.jsonl"
    while not (log.exists() and f'"phase": "{phase}"'.encode() in log.read_bytes()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for child in family:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.communicate(timeout=30)
    assert not (folder / "summary.json").exists(), "the run was over before it could be killed"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_in_a_branch_and_between_branches_it_is_the_same_run(tmp_path: Path) -> None:
    settings = (*TRUNK, *COLLAPSE, CHECKPOINTS, "model.width=40", "data.image_size=20")
    folders = tmp_path / "whole", tmp_path / "killed"
    commands = [command(folder, "--workers", "2", overrides=settings) for folder in folders]
    out, err = start(commands[0]).communicate(timeout=200)
    assert (folders[0] / "summary.json").exists(), out + err
    _kill_in("collapse-1", folders[1], commands[1])
    _kill_in("collapse-2", folders[1], [*commands[1], "--resume"])
    out, err = start([*commands[1], "--resume"]).communicate(timeout=200)
    for name in ("members/member-1.safetensors", "members/member-2.safetensors", "model.safetensors"):
        assert (folders[1] / name).read_bytes() == (folders[0] / name).read_bytes(), name
