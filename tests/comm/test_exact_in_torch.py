"""Exact sums by torch's operations, as on a device: the bits of the compiled helper."""

from __future__ import annotations

import pytest
import torch

from megabatch.comm import exact as module
from megabatch.comm.exact import SPARE_BITS, Verdict
from tests.comm.test_exact import one_tensor, summed


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
