"""The path for backends with collectives of their own, run on Gloo's: padding, operations, bounded waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megabatch.comm import allreduce
from megabatch.comm.allreduce import AllReducer
from megabatch.comm.grid import ProcessGrid
from megabatch.comm.library import LIBRARY
from megabatch.comm.phases import ALGORITHMS
from tests.ranks import run_ranks


def _reduce_by_library(rank: int) -> list[Any]:
    grid = ProcessGrid.build("2x3", timeout_seconds=20)
    wrong: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allreduce, "uses_gloo", lambda group: False)
        for algorithm in ALGORITHMS:
            for average in (False, True):
                reducer = AllReducer(grid, algorithm, average=average)
                for numel in (1, 7, 101, 96, 0):  # padded, padded, padded to another length, whole, empty
                    tensor = torch.arange(numel, dtype=torch.float32) * (rank + 1) + rank
                    reducer.run(tensor)
                    exact = (torch.arange(numel, dtype=torch.float64) * 21 + 15) / (6 if average else 1)
                    if not torch.allclose(tensor.double(), exact, rtol=1e-6, atol=0):
                        wrong.append((algorithm, average, numel))
        half = torch.full((5,), 60000.0)
        AllReducer(grid, "torus", average=True, grad_dtype=torch.float16).run(half)
        if not ((half - 60000).abs() <= 100).all():
            wrong.append(("half", half.tolist()))
    return wrong


def test_every_algorithm_works_on_the_backends_own_collectives() -> None:
    assert run_ranks(6, _reduce_by_library) == [[]] * 6


def test_every_operation_has_a_library_primitive() -> None:
    assert set(LIBRARY) == {"reduce_scatter", "all_reduce", "all_gather", "reduce", "broadcast", "exchange"}
