"""Each update rule in whole small runs: it learns, resumes bit for bit, and outlives gradients that are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import RankFailureError
from tests.system.runs import losses_of, read_checkpoint, rows_of, train_on_ranks

WHOLE = ("train.max_steps=14", "checkpoint.every_steps=2")
HALF = ("train.max_steps=7", "checkpoint.every_steps=2")
# The rate changes all along, and the transition of RMSprop warm-up, epochs 0.4 to 1.1, spans the interruption at 0.85.
RATE = "optimizer.lr=[{until_epoch=1.0,shape='linear',start=0.1,end=0.4},{until_epoch=9,start=0.05}]"
LARS = ("optimizer.name=lars", "optimizer.lars.trust_coefficient=0.01", RATE)
RMSPROP = (
    "optimizer.name=rmsprop_warmup",
    "optimizer.nesterov=false",
    "optimizer.rmsprop_warmup={center_epoch=0.8,period_epochs=0.6}",
    RATE,
)


@pytest.mark.parametrize("method", [LARS, RMSPROP], ids=["lars", "rmsprop_warmup"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(method: tuple[str, ...], tmp_path: Path) -> None:
    train_on_ranks(2, tmp_path / "whole", *WHOLE, *method)
    train_on_ranks(2, tmp_path / "part", *HALF, *method)
    train_on_ranks(2, tmp_path / "part", *WHOLE, *method, resume=True)
    whole, part = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "part"))
    assert whole == part
    losses = losses_of(tmp_path / "whole")
    assert losses == losses_of(tmp_path / "part")
    assert losses[-1] < losses[0]
    if method is RMSPROP:
        shares = [row["sgd_share"] for row in rows_of(tmp_path / "whole")]
        assert shares == sorted(shares)
        assert (shares[0] < 0.1, shares[7] != 1.0, shares[-1]) == (True, True, 1.0)


@pytest.mark.parametrize("method", [LARS[:2], RMSPROP[:3]], ids=["lars", "rmsprop_warmup"])
def test_gradients_that_are_not_finite_leave_the_last_good_checkpoint(method: tuple[str, ...], tmp_path: Path) -> None:
    rates = "optimizer.lr=[{until_epoch=0.2,start=0.05},{until_epoch=0.3,start=1e30},{until_epoch=9,start=0.05}]"
    limit = ("train.max_skipped_steps=1", "checkpoint.every_steps=1")
    with pytest.raises(RankFailureError, match="TrainingError: 2 steps in a row had gradients that are not finite"):
        train_on_ranks(2, tmp_path / "run", rates, *limit, *method)
    assert [row["applied"] for row in rows_of(tmp_path / "run")] == [1, 1, 1, 0, 0]
    assert (tmp_path / "run" / "checkpoints" / "last").resolve().name == "step-00000003.pt"


def floating_tensors(node: Any) -> Iterator[Tensor]:
    if isinstance(node, Tensor):
        if node.is_floating_point():
            yield node
    elif isinstance(node, dict | list | tuple):
        for one in node.values() if isinstance(node, dict) else node:
            yield from floating_tensors(one)


@pytest.mark.parametrize(
    ("method", "precision"),
    [
        pytest.param(LARS, "fp16", id="lars-fp16"),
        pytest.param(RMSPROP, "bf16", id="rmsprop_warmup-bf16"),
        pytest.param(LARS, "bf16", id="lars-bf16", marks=pytest.mark.slow),
        pytest.param(RMSPROP, "fp16", id="rmsprop_warmup-fp16", marks=pytest.mark.slow),
    ],
)
def test_half_precision_keeps_weights_momentum_and_statistics_in_fp32(
    method: tuple[str, ...], precision: str, tmp_path: Path
) -> None:
    train_on_ranks(1, tmp_path / "full", *HALF, *method)
    train_on_ranks(1, tmp_path / "half", *HALF, *method, f"train.precision={precision}")
    assert losses_of(tmp_path / "half") == pytest.approx(losses_of(tmp_path / "full"), rel=5e-2)
    assert losses_of(tmp_path / "half") != losses_of(tmp_path / "full")
    state = read_checkpoint(tmp_path / "half" / "checkpoints" / "last")
    tensors = list(floating_tensors(state))
    assert len(tensors) > 40
    assert all(tensor.dtype in (torch.float32, torch.float64) for tensor in tensors)
    assert all(tensor.isfinite().all() for tensor in tensors)
