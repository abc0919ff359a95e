"""Exact sums by torch's operations, as on a device: the bits of the compiled helper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megabatch
from megabatch.comm import exact as module
from megabatch.comm import exact_in_torch
from megabatch.comm.exact import SPARE_BITS, Verdict
from megabatch.comm.exact_in_torch import InTorch
from megabatch.comm.transfer import upload
from tests.comm.test_exact import one_tensor, summed
from tests.system.runs import rows_of, small_config


@pytest.mark.parametrize("numel", [1, 3, 4, 7, 1001])
@pytest.mark.parametrize("magnitude", [1e-12, 1.0, 3e20])
def test_the_helper_gives_the_bits_of_the_torch_code(
    numel: int, magnitude: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ghosts = [torch.randn(numel) * magnitude for _ in range(5)]
    ghosts[0][0] = 0.5 * magnitude  # halves are rounded to even
    largest = torch.stack(ghosts).abs().amax(dim=0)
    results = []
    for helper in (module._helper, lambda: None):
        monkeypatch.setattr(module, "_helper", helper)
        exact, parameter = one_tensor(largest, len(ghosts))
        found, verdict = summed(exact, parameter, ghosts)
        assert verdict == Verdict.FITS
        results.append((found, exact.state_dict()))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    expected = torch.stack(ghosts).double().mean(dim=0)
    assert (results[0][0].double() - expected).abs().max() < magnitude * 2.0 ** (SPARE_BITS - 24)


def test_a_run_of_many_buckets_has_the_bits_of_the_helper_and_sends_lists_in_its_first_steps_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch grows from one ghost batch to three; a pass in a CUDA graph may send nothing."""
    config = small_config(
        "train.max_steps=12", "train.global_batch_size=0:8 0.1:24", "comm.bucket_mb=0.02", "train.digest_every_steps=1"
    )
    found, sent_in = [], list[int]()
    steps = 0
    begin_step = InTorch.begin_step

    def begin(self: InTorch, *args: Any) -> bool:
        nonlocal steps
        steps += 1
        return begin_step(self, *args)

    def noted_upload(*args: Any) -> Tensor:
        sent_in.append(steps)
        return upload(*args)

    monkeypatch.setattr(InTorch, "begin_step", begin)
    monkeypatch.setattr(exact_in_torch, "upload", noted_upload)
    for name, helper in (("helper", module._helper), ("torch", lambda: None)):
        monkeypatch.setattr(module, "_helper", helper)
        megabatch.train(config, output=tmp_path / name)
        found.append([(row["loss"], row["gradient_norm"], row["weights_digest"]) for row in rows_of(tmp_path / name)])
    assert found[0] == found[1]
    assert steps > 12
    assert sent_in
    assert max(sent_in) <= 5  # bound twice, the warm-up pass, and the first step with rearranged buckets, made twice


def test_buckets_that_are_rearranged_are_learnt_again() -> None:
    sizes, numbers = [3, 5, 2], torch.Generator().manual_seed(1)
    in_torch, shifts = InTorch(sizes, torch.device("cpu")), torch.tensor([20, 10, 15])
    for buckets in ([[2, 1], [0]], [[2, 1], [0]], [[1], [0, 2]], [[1], [0, 2]]):
        in_torch.begin_step(shifts, 3)
        for places in buckets:
            memory = torch.randn(sum(sizes[place] for place in places), generator=numbers)
            gradients = list(memory.split([sizes[place] for place in places]))
            wanted = [torch.round(one * 2.0 ** int(shifts[p])) for p, one in zip(places, gradients, strict=True)]
            integers = [gradient.view(torch.int32) for gradient in gradients]
            in_torch.to_integers(places, gradients, None, integers)
            assert [one.tolist() for one in integers] == [one.tolist() for one in wanted]
            means = [
                one.int() * torch.tensor(2.0 ** -int(shifts[p]) / 3) for p, one in zip(places, wanted, strict=True)
            ]
            in_torch.to_floats(places, gradients)
            assert all(one.equal(mean) for one, mean in zip(gradients, means, strict=True))
