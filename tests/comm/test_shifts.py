"""Steps that are read one step late, as on an accelerator, leave the bits of steps that are read at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

import megabatch
from megabatch.comm import shifts
from megabatch.optim import lamb
from megabatch.optim.skip import can_skip
from megabatch.train.components import Components
from megabatch.train.step import StartedStep, StepResult
from tests.system.runs import rows_of, small_config

NOT_COMPARED = {"images_per_second", "wall_seconds", "applied"}
OPTIMIZERS = {
    "lars": ("optimizer.name=lars", "optimizer.nesterov=false"),
    "lamb": ("optimizer.name=lamb", "optimizer.nesterov=false"),
    "rmsprop warm-up": ("optimizer.name=rmsprop_warmup", "optimizer.nesterov=false"),
}


def trained(folder: Path, *settings: str) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    config = small_config("train.max_steps=14", "train.digest_every_steps=5", *settings)
    megabatch.train(config, output=folder)
    rows = [
        {name: value for name, value in row.items() if name not in NOT_COMPARED and not name.endswith("_seconds")}
        for row in rows_of(folder)
    ]
    return rows, load_file(folder / "model.safetensors")


def as_on_a_device(self: Components) -> bool:
    if self.noise_scale is not None:
        self.noise_scale._reads_late = True
    return can_skip(self.optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "more", [(), ("batch_control.measure_every_steps=2",), ("train.precision=bf16", "train.audit_every_steps=4")]
)
def test_sums_that_do_not_fit_are_done_again_to_the_same_bits(
    name: str, more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shifts, "SPARE_BITS", 0)  # a gradient that reaches a higher power of two does not fit
    monkeypatch.setattr(lamb, "_on_host", lambda _: False)
    expected_rows, expected = trained(tmp_path / "at once", *OPTIMIZERS[name], *more)
    monkeypatch.setattr(Components, "decides_on_device", property(as_on_a_device))
    dropped: list[StartedStep] = []
    refused: list[StartedStep] = []
    drop, result = StartedStep.drop, StartedStep.result

    def noted_drop(self: StartedStep) -> None:
        dropped.append(self)
        drop(self)

    def noted_result(self: StartedStep) -> StepResult | None:
        found = result(self)
        refused.extend([self] if found is None else [])
        return found

    monkeypatch.setattr(StartedStep, "drop", noted_drop)
    monkeypatch.setattr(StartedStep, "result", noted_result)
    rows, found = trained(tmp_path / "late", *OPTIMIZERS[name], *more)
    assert rows[-1]["repeated_steps"] > 3
    assert rows == expected_rows
    assert all(tensor.equal(expected[key]) for key, tensor in found.items())
    assert set(dropped) > set(refused) != set()  # also steps that were started behind one that did not fit
