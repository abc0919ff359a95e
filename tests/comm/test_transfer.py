"""Numbers go up and come down unchanged; that nothing waits for a device is shown in tests/accelerator."""

from __future__ import annotations

import torch

from megabatch.comm.transfer import Reading, upload


def test_numbers_keep_their_bits() -> None:
    numbers = [0.1, -2.5, 1e300, float("inf")]
    there = upload(numbers, torch.device("cpu"))
    assert there.dtype == torch.float64
    assert Reading(there).list() == numbers
    assert upload([1, 0], torch.device("cpu"), torch.int64).tolist() == [1, 0]
