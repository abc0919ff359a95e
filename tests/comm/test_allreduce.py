"""Every algorithm on every grid against a float64 sum: different data on each rank, odd lengths, all float types."""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megabatch.comm import allreduce
from megabatch.comm import phases as phases_module
from megabatch.comm.allreduce import AllReducer
from megabatch.comm.grid import ProcessGrid
from megabatch.comm.phases import ALGORITHMS, WORLD, Phase, num_channels, phases
from megabatch.comm.select import all_reduce
from megabatch.comm.shape import GridShape, parse_grid
from megabatch.errors import ConfigError
from tests.comm.reference import reference_all_reduce
from tests.ranks import run_ranks

LENGTHS = (0, 1, 7, 1009, 6000, 100_003)  # the last is longer than what is cached, or sent in one hop
OTHER_DTYPES = (torch.float64, torch.float16, torch.bfloat16)


def _data(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Different on every rank and position, and not symmetric under exchange of ranks."""
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * (rank + 1) + rank).to(dtype)


def _is_sum(result: torch.Tensor, world_size: int, divisor: int = 1) -> bool:
    """Whether `result` is the sum of all ranks' data: each of n additions may be off by half a unit of the total."""
    terms = torch.stack([_data(rank, result.numel(), result.dtype).double() for rank in range(world_size)])
    exact = terms.sum(dim=0) / divisor
    bound = world_size * torch.finfo(result.dtype).eps * terms.abs().sum(dim=0) / divisor
    return bool(((result.double() - exact).abs() <= bound).all())


def _bits(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()


def _cases() -> Iterator[tuple[str, int, torch.dtype, bool]]:
    for algorithm in ALGORITHMS:
        yield from ((algorithm, numel, torch.float32, False) for numel in LENGTHS)
        yield from ((algorithm, numel, dtype, False) for dtype in OTHER_DTYPES for numel in (1, 1009))
        yield from ((algorithm, 1009, dtype, True) for dtype in (torch.float32, *OTHER_DTYPES))


def _reduce_everything(rank: int, shapes: list[str]) -> tuple[list[Any], list[str]]:
    wrong: list[Any] = []
    bits: list[str] = []
    for shape in shapes:
        grid = ProcessGrid.build(shape, timeout_seconds=20)
        _reduce_on(grid, wrong, bits)
    return wrong, bits


def _reduce_on(grid: ProcessGrid, wrong: list[Any], bits: list[str]) -> None:
    rank, shape = grid.rank, grid.shape.text
    for algorithm, numel, dtype, average in _cases():
        tensor = _data(rank, numel, dtype)
        all_reduce(tensor, grid, algorithm, average=average)
        if not _is_sum(tensor, grid.world_size, grid.world_size if average else 1):
            wrong.append((shape, algorithm, numel, dtype, average))
        bits.append(_bits(tensor))
    # In pieces of eight elements, and again: the same bits.
    for algorithm in ALGORITHMS:
        tensors = [_data(rank, 6000, torch.float32) for _ in range(3)]
        for tensor, segment_bytes in zip(tensors, (32, 32, 2**20), strict=True):
            AllReducer(grid, algorithm, segment_bytes=segment_bytes).run(tensor)
        if not (torch.equal(tensors[0], tensors[1]) and torch.equal(tensors[0], tensors[2])):
            wrong.append((shape, algorithm, "segments"))


@pytest.mark.parametrize("shapes", [["1x3", "3x1"], ["2x2"], ["2x3", "3x1x2"]])
def test_every_algorithm_is_a_sum_and_all_ranks_agree_bit_for_bit(shapes: list[str]) -> None:
    answers = run_ranks(parse_grid(shapes[0]).world_size, _reduce_everything, shapes)
    for wrong, bits in answers:
        assert wrong == []
        assert bits == answers[0][1]


def _mutant_phases(kind: str) -> Any:
    """Broken algorithms: one that does nothing, one that skips an axis, one that forgets to gather."""

    def broken(algorithm: str, shape: GridShape, *size: float, **options: bool) -> tuple[Phase, ...]:
        good = phases(algorithm, shape, *size, **options)
        if kind == "no-op":
            return ()
        if kind == "forgot the column":
            row = good[0]
            return (Phase("all_reduce", "ring", row.axis, row.size),)
        return good[:-1]

    return broken


def _run_mutants(rank: int) -> dict[str, bool]:
    grid = ProcessGrid.build("2x2", timeout_seconds=20)
    passes = {}
    for kind in ("no-op", "forgot the column", "forgot to gather"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(allreduce, "phases", _mutant_phases(kind))
            tensor = _data(rank, 1009, torch.float32)
            AllReducer(grid).run(tensor)
            passes[kind] = _is_sum(tensor, 4)
    return passes


def test_the_comparison_finds_broken_algorithms() -> None:
    for passes in run_ranks(4, _run_mutants):
        assert passes == {"no-op": False, "forgot the column": False, "forgot to gather": False}


def _half_on_the_wire(rank: int) -> list[Any]:
    grid = ProcessGrid.build("2x3", timeout_seconds=20)
    results: list[Any] = []
    for algorithm in ALGORITHMS:
        for grad_dtype in (torch.float16, torch.bfloat16):
            tensor = _data(rank, 1009, torch.float32)
            all_reduce(tensor, grid, algorithm, average=True, grad_dtype=grad_dtype)
            terms = torch.stack([_data(other, 1009, torch.float32).double() for other in range(6)])
            # Rounding to the wire, two divisions, six sums: ten roundings of half a unit each, with one to spare.
            bound = 5.5 * torch.finfo(grad_dtype).eps * terms.abs().mean(dim=0)
            close = bool(((tensor.double() - terms.mean(dim=0)).abs() <= bound + 1e-6).all())
            results.append((algorithm, grad_dtype, close, _bits(tensor)))
        # Where the world is crossed at once, half the division comes after the sum, which leaves less room.
        value = 20000.0 if phases(algorithm, grid.shape)[0].axis == WORLD else 60000.0
        large = torch.full((5,), value)
        all_reduce(large, grid, algorithm, average=True, grad_dtype=torch.float16)
        results.append((algorithm, "large", bool(((large - value).abs() <= value * 2**-8).all()), _bits(large)))
    # Dividing before rounding to the grad_dtype: 100000 does not fit float16, a sixth of it does.
    beyond = torch.full((5,), 100000.0 if rank == 0 else 0.0)
    all_reduce(beyond, grid, "torus", average=True, grad_dtype=torch.float16)
    results.append(("torus", "beyond", bool(((beyond - 100000 / 6).abs() <= 20).all()), _bits(beyond)))
    return results


def test_half_precision_on_the_wire_averages_without_overflow() -> None:
    answers = run_ranks(6, _half_on_the_wire)
    assert [entry for entry in answers[0] if not entry[2]] == []
    assert all(answer == answers[0] for answer in answers)


def _edges(rank: int) -> dict[str, Any]:
    grid = ProcessGrid.build("1x2", timeout_seconds=20)
    facts: dict[str, Any] = {}
    matrix = torch.full((3, 4), rank + 1.0, requires_grad=True)
    all_reduce(matrix, grid)
    facts["matrix"] = bool((matrix == 3).all())
    for name, tensor in {
        "strided": torch.ones(4, 6)[:, ::2],
        "integer": torch.ones(4, dtype=torch.int64),
    }.items():
        try:
            all_reduce(tensor, grid)
        except ConfigError as error:
            facts[name] = str(error)
    for name, options in {"segment": {"segment_bytes": 0}, "grad_dtype": {"grad_dtype": torch.int8}}.items():
        try:
            AllReducer(grid, "torus", **options)  # type: ignore[arg-type]
        except ConfigError as error:
            facts[name] = str(error)
    many = [torch.full((100,), float(rank + call)) for call in range(600)]  # more calls than tags tell apart
    for tensor in many:
        all_reduce(tensor, grid, "exchange")
    facts["many"] = all((tensor == 2 * call + 1).all() for call, tensor in enumerate(many))
    return facts


def _again_and_again(rank: int) -> list[str]:
    """Messages of several kinds in turn, new content each time, ranks late at random, more kinds than are cached."""
    grid = ProcessGrid.build("2x2", timeout_seconds=20)
    late = random.Random(rank)
    wrong = []
    for algorithm in (*ALGORITHMS, "torus"):  # the torus twice: a second reducer beside the first, of the same kinds
        reducer = AllReducer(grid, algorithm, average=True)
        for turn in range(45):
            numel = (3, 1009, 70_001)[turn % 3] if turn < 21 else 2000 + turn
            tensor = _data(10 * turn + rank, numel, torch.float32)
            time.sleep(late.choice((0.0, 0.0, 0.002)))
            reducer.run(tensor)
            terms = [_data(10 * turn + other, numel, torch.float32).double() for other in range(4)]
            mean = torch.stack(terms).mean(dim=0)
            if not torch.allclose(tensor.double(), mean, rtol=1e-5, atol=1e-4):
                wrong.append(f"{algorithm}, turn {turn}, {numel} elements")
    return wrong


def test_receives_posted_ahead_never_mix_messages_or_rounds() -> None:
    assert run_ranks(4, _again_and_again) == [[], [], [], []]


def _in_several_channels(rank: int) -> tuple[list[Any], list[str]]:
    """Two hosts of two ranks each: rows and columns are different links, so that a long torus has channels."""
    os.environ["MEGABATCH_HOST"] = f"host{rank // 2}"
    grid = ProcessGrid.build(timeout_seconds=20)
    assert grid.shape.text == "2x2"
    assert grid.separate_links
    wrong: list[Any] = []
    bits = []
    reducer = AllReducer(grid, "torus", average=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phases_module, "_CHANNEL_BYTES", 140_000)
        for numel, channels in ((65_537, 1), (70_001, 2), (150_001, 4), (70_001, 2), (5, 1)):
            if num_channels(phases("torus", (2, 2), 4 * numel, separate_links=True)) != channels:
                wrong.append((numel, "channels"))
            tensor = _data(rank, numel, torch.float32)
            reducer.run(tensor)
            bits.append(_bits(tensor))
            if not _is_sum(tensor, 4, 4):
                wrong.append((numel, "sum"))
    return wrong, bits


def test_a_long_torus_in_several_channels_is_a_sum() -> None:
    answers = run_ranks(4, _in_several_channels)
    for wrong, bits in answers:
        assert wrong == []
        assert bits == answers[0][1]


def test_edges() -> None:
    for facts in run_ranks(2, _edges):
        assert facts["matrix"]
        assert facts["many"]
        assert facts["strided"] == (
            "a tensor of shape (4, 3) and strides (6, 2) is not contiguous, and the sum is made in place; "
            "reduce tensor.contiguous() and copy it back"
        )
        assert "torch.int64 cannot be summed; give float16" in facts["integer"]
        assert "segment of 0 bytes" in facts["segment"]
        assert "grad_dtype torch.int8; choose float16" in facts["grad_dtype"]


def test_the_bound_of_the_comparison_is_tight_enough_to_notice_one_missing_rank() -> None:
    total = torch.stack([_data(rank, 1009, torch.float32) for rank in range(6)]).sum(dim=0)
    assert _is_sum(total, 6)
    assert not _is_sum(total - _data(0, 1009, torch.float32), 6)


def _compare(rank: int, shape: str) -> list[tuple[str, int]]:
    grid = ProcessGrid.build(shape, timeout_seconds=20)
    different = []
    for algorithm in ALGORITHMS:
        for numel in (0, 1, 5, 101):
            # Whole numbers add without rounding, so the order of addition cannot show.
            own = torch.arange(numel, dtype=torch.float32) * (rank + 1) + 7 * rank
            fast, slow = own.clone(), own.clone()
            all_reduce(fast, grid, algorithm)
            reference_all_reduce(slow, grid, algorithm)
            num = grid.world_size
            exact = torch.arange(numel) * (num * (num + 1) / 2) + 7 * num * (num - 1) / 2
            if not (torch.equal(fast, slow) and torch.equal(slow, exact.float())):
                different.append((algorithm, numel))
    return different


def test_the_slow_twin_gives_the_same_sums() -> None:
    assert run_ranks(6, _compare, "2x3") == [[]] * 6
