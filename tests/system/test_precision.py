"""Half precision, compilation and gradients that are not finite, through whole small runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.ranks import RankFailureError
from tests.system.runs import losses_of, read_checkpoint, rows_of, train_on_ranks

STEPS = "train.max_steps=6"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("full") / "run"
    train_on_ranks(2, folder, STEPS)
    return losses_of(folder)


@pytest.mark.parametrize(
    "setting", ["train.precision=bf16", "train.precision=fp16", "comm.grad_dtype=bf16", "comm.grad_dtype=fp16"]
)
def test_half_precision_follows_full_precision(setting: str, full: list[float], tmp_path: Path) -> None:
    train_on_ranks(2, tmp_path / "run", STEPS, setting)
    losses = losses_of(tmp_path / "run")
    assert losses == pytest.approx(full, rel=3e-2)
    assert losses != full, f"{setting} changed nothing"
    # The loss scale of fp16 starts high: its first steps may be skipped, and are then counted.
    if "fp16" not in setting:
        assert all(row["applied"] for row in rows_of(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_compiled_network_trains_alike_under_plain_names(full: list[float], tmp_path: Path) -> None:
    train_on_ranks(1, tmp_path / "run", STEPS, "train.compile=true")
    assert losses_of(tmp_path / "run") == pytest.approx(full, rel=1e-3)


def test_gradients_that_are_not_finite_are_skipped_counted_and_end_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    # The first two steps are sane, the third is enormous; what follows cannot be finite.
    rates = "optimizer.lr=[{until_epoch=0.2,start=0.05},{until_epoch=0.3,start=1e30},{until_epoch=9,start=0.05}]"
    with pytest.raises(RankFailureError, match="TrainingError: 4 steps in a row had gradients that are not finite"):
        train_on_ranks(2, folder, rates, "train.max_skipped_steps=3", "checkpoint.every_steps=1")
    rows = rows_of(folder)
    assert [row["applied"] for row in rows] == [1, 1, 1, 0, 0, 0, 0]
    assert rows[-1]["gradient_norm"] is None  # JSON has no NaN
    assert len(rows) == 7
    assert not (folder / "summary.json").exists()
    # The last checkpoint is of the last step with a finite gradient: none was written over it.
    assert (folder / "checkpoints" / "last").resolve().name == "step-00000003.pt"
    state = read_checkpoint(folder / "checkpoints" / "last")
    assert all(value.isfinite().all() for name, value in state["model"].items() if "running" in name)


def test_one_bad_batch_is_skipped_counted_and_leaves_no_trace(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = ("model.name=tests.system.models:Stumbling", "model.zero_gamma=none", "train.max_steps=6")
    for statistics, sums in (("norm.momentum=0.1", "exact"), ("norm.exact_batches=2", "float")):
        summary = train_on_ranks(1, folder, *settings, statistics, f"comm.sums={sums}")
        rows = rows_of(folder)
        bad = 1 if sums == "exact" else 2  # the model counts passes, and exact sums repeat the first step
        assert [row["applied"] for row in rows] == [int(step != bad) for step in range(6)]
        assert [row["skipped_steps"] for row in rows] == [int(step >= bad) for step in range(6)]
        assert summary["skipped_steps"] == 1
        assert rows[-1]["val_loss"] is not None  # null would mean that infinity stayed in the statistics
        assert all(value.isfinite().all() for value in load_file(folder / "model.safetensors").values())
        shutil.rmtree(folder)


def test_the_best_weights_are_saved_though_the_step_after_them_was_skipped(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = ("model.name=tests.system.models:Stumbling", "model.zero_gamma=none", "train.max_steps=3")
    summary = train_on_ranks(1, folder, *settings, "comm.sums=float")
    assert [row["applied"] for row in rows_of(folder)] == [1, 1, 0]
    assert summary["best_top1"] == summary["top1"]
    assert (folder / "checkpoints" / "best").resolve().name == "step-00000003.pt"


def test_a_branch_that_diverges_stops_the_run_and_keeps_what_was_good(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    pieces = "[{until_epoch=0.13,start=0.05},{until_epoch=0.25,start=1e30},{until_epoch=9,start=0.05}]"
    branch = ("train.epochs=1", "collapse.at_epochs=[0.25]", "collapse.epochs=0.9")
    settings = (*branch, "train.max_skipped_steps=1", "checkpoint.every_steps=1")
    with pytest.raises(RankFailureError, match="TrainingError: 2 steps in a row had gradients that are not finite"):
        train_on_ranks(2, folder, f"collapse.lr={pieces}", *settings)
    assert [(row["phase"], row["applied"]) for row in rows_of(folder)] == [
        *[("trunk", 1)] * 3, *[("collapse-1", 1)] * 3, *[("collapse-1", 0)] * 2,
    ]  # fmt: skip
    assert not (folder / "members").exists()
    # Checkpoint 6 has the enormous step in it; the one before is good, and the way out is a lower rate from there.
    (folder / "checkpoints" / "step-00000006.pt").unlink()
    summary = train_on_ranks(2, folder, "collapse.lr=0.01", *settings, resume=True)
    assert (summary["status"], summary["skipped_steps"], len(summary["members"])) == ("finished", 0, 1)
    assert [row["phase"] for row in rows_of(folder)] == ["trunk"] * 3 + ["collapse-1"] * 8 + ["trunk"] * 6


def test_a_model_from_a_function(tmp_path: Path) -> None:
    summary = train_on_ranks(1, tmp_path / "run", STEPS, "model.name=tests.system.models:tiny", "model.zero_gamma=none")
    assert summary["steps"] == 6


def test_synchronised_batch_norm_is_refused(tmp_path: Path) -> None:
    name = "model.name=tests.system.models:synchronised"
    with pytest.raises(RankFailureError, match=r"ConfigError: model .* has SyncBatchNorm"):
        train_on_ranks(1, tmp_path / "run", STEPS, name, "model.zero_gamma=none")
