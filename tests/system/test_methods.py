"""Each update rule in whole small runs: it learns, resumes bit for bit, and outlives gradients that are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.exact_bits import Case, left_behind, verdict
from megabatch.use.evaluate import evaluate_run
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
SMALL_RATE = "optimizer.lr=[{until_epoch=1.0,shape='linear',start=0.002,end=0.02},{until_epoch=9,start=0.005}]"
EMA = ("model.ema_half_life_epochs=0.5", "norm.exact_batches=4")
METHODS = {
    "lamb": ("optimizer.name=lamb", SMALL_RATE),
    "shampoo": (
        *("optimizer.name=shampoo", "optimizer.nesterov=true", "optimizer.lr=0.05"),
        "optimizer.shampoo={start_steps=2,every_steps=3,block_size=16}",
    ),
    "adamw": ("optimizer.name=adamw", SMALL_RATE),
    "nadamw, clipped": ("optimizer.name=nadamw", "optimizer.clip_norm=1", SMALL_RATE),
    "lion of pytorch-optimizer": (
        "optimizer.name=pytorch_optimizer:Lion",
        "optimizer.settings={betas=[0.9,0.98]}",
        "optimizer.lr=0.002",
    ),
    "sm3 of pytorch-optimizer": ("optimizer.name=pytorch_optimizer:SM3", "optimizer.weight_decay=0"),
    "random numbers in the step": ("optimizer.name=tests.system.models:NoisySGD",),
    "averaged weights": ("optimizer.nesterov=true", *EMA, "train.evaluate_every_epochs=1"),
    "averaged weights, a branch": (*EMA, "collapse.at_epochs=[1.0]", "collapse.epochs=0.5", "optimizer.nesterov=true"),
    "momentum that is reset": (
        *("optimizer.name=pytorch_optimizer:Lamb", "train.reset_momentum_at_epochs=[0.5]"),
        *("optimizer.settings={rectify=true,weight_decouple=false}", SMALL_RATE),
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_the_bits_are_the_same_on_one_worker_and_on_two_then_three(name: str, tmp_path: Path) -> None:
    method = ("optimizer.nesterov=false", "train.epochs=9", *METHODS[name])
    train_on_ranks(1, tmp_path / "alone", *WHOLE, *method)
    train_on_ranks(2, tmp_path / "part", *HALF, *method)
    train_on_ranks(3, tmp_path / "part", *WHOLE, *method, resume=True)
    alone, part = left_behind(tmp_path / "alone"), left_behind(tmp_path / "part")
    assert verdict(Case(name, (2, 3)), part, alone) == "equal"
    losses = losses_of(tmp_path / "alone")
    assert losses[-1] < losses[0]


def test_the_average_of_the_weights_is_what_is_evaluated_and_saved(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    summary = train_on_ranks(2, folder, *WHOLE, *EMA)
    state, model = read_checkpoint(folder / "checkpoints" / "last"), load_file(folder / "model.safetensors")
    assert state["ema"]["samples"] == 14 * 40
    for key, value in state["ema"]["model"].items():
        assert torch.equal(model[key], value), key
        assert not (key.endswith("weight") and torch.equal(state["model"][key], value)), key
    found = evaluate_run(folder, None)
    assert found is not None
    assert (found["top1"], found["loss"]) == (summary["top1"], summary["val_loss"])
    (folder / "summary.json").unlink()  # as in a run that is not over
    found = evaluate_run(folder, None)
    assert found is not None
    assert (found["top1"], found["loss"]) == (summary["top1"], summary["val_loss"])
    assert found["weights"] == "checkpoint of step 14"


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
