"""The batch changes in mid-epoch, by plan or by measurement: the same steps on any workers, however interrupted."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.utils import get_total_norm

from megabatch.schedule.adaptive import AdaptiveBatch
from megabatch.schedule.noise import NoiseSample
from megabatch.train import step
from tests.ranks import run_ranks
from tests.system.runs import losses_of, rows_of, train_on_ranks, train_one

CHECKPOINTS = "checkpoint.every_steps=2"
STAGES = (
    *(
        "train.global_batch_size=0:40 0.3:48 0.8:80 1.1:40",
        "train.epochs=1.4",
        "batch_control.noise_rule=momentum",
        CHECKPOINTS,
    ),
    *("norm.exact_batches=5", "norm.variance=pooled", "batch_control.measure_every_steps=2"),
)
# A threshold this low is always passed: what is tested is when a change is decided and when it takes effect.
ADAPTIVE = (
    *("train.global_batch_size=16", "train.epochs=3.5", "batch_control.noise_rule=lr", CHECKPOINTS),
    *("batch_control.adaptive.max_global_batch_size=96", "batch_control.adaptive.threshold=1e-9"),
    *("batch_control.adaptive.patience=3", "batch_control.adaptive.from_epoch=0.3"),
    *("batch_control.adaptive.lead_steps=3", "batch_control.smoothing=0.9", "optimizer.lr=0.02"),
)


def interrupted(folder: Path, settings: tuple[str, ...], limits: tuple[int, ...]) -> Path:
    for position, limit in enumerate((*limits, 0)):
        train_on_ranks(2, folder, *settings, f"train.max_steps={limit}", resume=position > 0)
    return folder


def same_run(one: Path, other: Path) -> None:
    assert losses_of(one) == losses_of(other)
    for name in ("global_batch_size", "lr", "momentum", "samples", "noise_scale"):
        assert [row.get(name) for row in rows_of(one)] == [row.get(name) for row in rows_of(other)], name
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def same_run_up_to_rounding(one: Path, other: Path) -> None:
    assert losses_of(one) == pytest.approx(losses_of(other), rel=1e-4)
    for mine, theirs in zip(rows_of(one), rows_of(other), strict=True):
        assert mine["global_batch_size"] == theirs["global_batch_size"]
        # Near zero signal the scale itself is anything; its inverse is not.
        if mine.get("noise_scale") and theirs.get("noise_scale"):
            assert 1 / mine["noise_scale"] == pytest.approx(1 / theirs["noise_scale"], rel=1e-2, abs=1e-4)
    ours, expected = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4, msg=name)


def check_accounting(rows: list[dict[str, Any]]) -> None:
    seen = 0
    for row in rows:
        seen += row["global_batch_size"]
        assert (row["samples"], row["epoch"]) == (seen, pytest.approx(seen / 330))


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages") / "run"
    train_on_ranks(2, folder, *STAGES)
    return folder


@pytest.fixture(scope="module")
def adaptive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adaptive") / "run"
    train_on_ranks(2, folder, *ADAPTIVE)
    return folder


def test_stages_momentum_and_noise_scale_in_the_log(stages: Path) -> None:
    rows = rows_of(stages)
    # 99, 264 and 363 images into the run; 462 in all, cut to 456.
    assert [row["global_batch_size"] for row in rows] == [40] * 3 + [48] * 3 + [80] * 2 + [32]
    check_accounting(rows)
    assert [row["momentum"] for row in rows] == pytest.approx([0.9] * 3 + [1 - 0.1 / 1.2] * 3 + [0.95] * 2 + [0.9])
    assert {row["lr"] for row in rows} == {0.2}
    measured = [row["noise_scale"] for row in rows if row.get("noise_scale") is not None]
    assert measured
    assert all(scale > 0 for scale in measured)


def test_resumed_inside_every_stage(stages: Path, tmp_path: Path) -> None:
    same_run(interrupted(tmp_path / "run", STAGES, (2, 5, 7)), stages)


def test_the_batch_grows_by_measurement_and_the_rate_with_it(adaptive: Path) -> None:
    rows = rows_of(adaptive)
    check_accounting(rows)
    totals = [row["global_batch_size"] for row in rows[:-1]]
    assert sorted(set(totals)) == [16, 32, 64, 96]
    assert totals == sorted(totals)
    # Step 7 ends past epoch 0.3; 3 in favour are steps 7, 8, 9; 3 more are settled; step 13 is the first of 32.
    assert next(number for number, (a, b) in enumerate(pairwise(totals), start=2) if a != b) == 13
    assert [row["lr"] for row in rows[:-1]] == pytest.approx([0.02 * total / 16 for total in totals])


def test_adaptive_growth_is_resumed_between_decision_and_effect(adaptive: Path, tmp_path: Path) -> None:
    # 8: patience half used up; 11: decided, not yet in effect; 14: in effect.
    same_run(interrupted(tmp_path / "run", ADAPTIVE, (8, 11, 14)), adaptive)


def train_with_uneven_norms(rank: int, folder: str) -> list[list[float]]:
    """A host with another processor may sum a gradient's norm in another order; here it is off by far more."""
    decided: list[list[float]] = []
    observe = AdaptiveBatch.observe

    def noted(adaptive: AdaptiveBatch, epoch: float, average: NoiseSample | None) -> None:
        observe(adaptive, epoch, average)
        if average is not None:
            decided.append([average.noise, average.signal])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdaptiveBatch, "observe", noted)
        patch.setattr(step, "get_total_norm", lambda *args, **options: get_total_norm(*args, **options) * (1 + rank))
        train_one(rank, 2, folder, (*ADAPTIVE, "train.max_steps=4"), False)
    return decided


def test_all_workers_decide_from_the_same_numbers(tmp_path: Path) -> None:
    one, other = run_ranks(2, train_with_uneven_norms, str(tmp_path / "run"))
    assert one
    assert one == other


@pytest.mark.slow
def test_neither_workers_nor_read_ahead_change_the_run(stages: Path, adaptive: Path, tmp_path: Path) -> None:
    train_on_ranks(3, tmp_path / "stages", *STAGES)
    same_run_up_to_rounding(tmp_path / "stages", stages)
    train_on_ranks(1, tmp_path / "one", *ADAPTIVE, "data.prefetch_ghosts=64")
    same_run_up_to_rounding(tmp_path / "one", adaptive)
    train_on_ranks(2, tmp_path / "two", *ADAPTIVE, "data.prefetch_ghosts=1")
    same_run(tmp_path / "two", adaptive)
