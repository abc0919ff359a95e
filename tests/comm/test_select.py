"""`auto`: what is measured decides, all ranks decide alike, and the backend stays unless it is beaten."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megabatch.comm import select
from megabatch.comm.allreduce import AllReducer
from megabatch.comm.calibration import (
    AxisCost,
    Calibration,
    Choice,
    MeasuredPoint,
    PricedAlgorithm,
    predictions,
    write_calibration_file,
)
from megabatch.comm.grid import ProcessGrid
from megabatch.comm.hook import gradient_hook
from megabatch.comm.select import AutoReducer, all_reduce, race_choices
from megabatch.comm.shape import GridShape
from megabatch.errors import ConfigError
from tests.ranks import run_ranks

SHAPE = GridShape((2, 2))
SIZES = (4096, 65536, 2**20)
LINK = {"latency_seconds": 1e-3, "bytes_per_second": 1e8, "message_overhead_seconds": 1e-5}
CALIBRATION = Calibration(
    "2x2",
    2,
    "gloo",
    (AxisCost(**LINK, name="column", size=2), AxisCost(**LINK, name="row", size=2)),
    (MeasuredPoint("backend", 4096, 6e-3), MeasuredPoint("backend", 2**20, 20e-3)),
)


def _decide(
    monkeypatch: pytest.MonkeyPatch,
    seconds: Callable[[str, int], float],
    budget_seconds: float = 10.0,
    calibration: Calibration = CALIBRATION,
) -> tuple[tuple[Choice, ...], list[tuple[int, int]]]:
    """Choices when an algorithm takes `seconds(name, bytes)`, and (bytes, rounds) of every race that was run."""
    races: list[tuple[int, int]] = []

    class FakeReducer:
        def __init__(self, grid: object, algorithm: str, *, segment_bytes: int) -> None:
            assert segment_bytes > 0

        def run(self, tensor: torch.Tensor) -> int:
            return tensor.numel() * 4

        def close(self) -> None:
            pass

    def fake_race(grid: object, runs: Mapping[str, Callable[[], int]], rounds: int) -> dict[str, list[float]]:
        sizes = {name: run() for name, run in runs.items()}
        races.append((next(iter(sizes.values())), rounds))
        return {name: [seconds(name, size)] * rounds for name, size in sizes.items()}

    monkeypatch.setattr(select, "AllReducer", FakeReducer)
    monkeypatch.setattr(select, "race", fake_race)
    monkeypatch.setattr(select, "probe_device", lambda grid: torch.device("cpu"))
    grid: Any = SimpleNamespace(shape=SHAPE)
    return race_choices(grid, calibration, SIZES, budget_seconds), races


def test_the_fastest_as_measured_is_chosen_whatever_its_price(monkeypatch: pytest.MonkeyPatch) -> None:
    ranked = {size: predictions(CALIBRATION, SHAPE, size) for size in SIZES}
    dearest = [select._candidates(ranked[size], size, 1e9, 1e9, None)[-2].algorithm for size in SIZES]
    assert [ranked[size][0].algorithm for size in SIZES] != dearest
    by_size = dict(zip(SIZES, dearest, strict=True))
    choices, races = _decide(monkeypatch, lambda name, size: 1e-3 if name == by_size[size] else 2e-3)
    assert [choice.algorithm for choice in choices] == dearest
    assert [choice.message_bytes for choice in choices] == list(SIZES)
    assert all(choice.seconds == 1e-3 for choice in choices)
    assert choices[0].reason.startswith(f"4 KiB: {dearest[0]}, 1 ms measured, against ")
    assert "backend 2 ms" in choices[0].reason
    # After the heats the two fastest and the backend run on.
    assert races == [(size, rounds) for size in SIZES for rounds in (1, 3, 60)]


def _own_by_ratio(ratio: float, name: str, size: int) -> float:
    return 1e-3 * (1 if name == "backend" else ratio)


def test_the_backend_stays_when_nothing_is_clearly_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    for ratio, wanted in ((1.5, "backend"), (0.96, "backend"), (0.94, "other")):
        choices, _ = _decide(monkeypatch, partial(_own_by_ratio, ratio))
        assert all((choice.algorithm == "backend") == (wanted == "backend") for choice in choices), ratio
        assert all("\n" not in choice.reason for choice in choices)


def test_a_size_too_long_to_try_follows_the_one_below(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.1 s in all: 4 KiB uses most of it, and the sizes above would take longer than what is left."""

    def own_wins(name: str, size: int) -> float:
        return 0.03 if name == "backend" else 0.02

    choices, races = _decide(monkeypatch, own_wins, budget_seconds=0.1)
    assert [size for size, _ in races] == [4096]
    assert choices[0].algorithm != "backend"
    assert "not tried" in choices[1].reason
    assert "the price corrected at 4 KiB" in choices[1].reason
    assert choices[1].algorithm != "backend"

    def backend_wins(name: str, size: int) -> float:
        return 0.02 if name == "backend" else 0.03

    choices, _ = _decide(monkeypatch, backend_wins, budget_seconds=0.1)
    assert [choice.algorithm for choice in choices] == ["backend"] * 3
    assert choices[2].reason == "1 MiB: backend, not tried (too long for start-up); it won at 4 KiB"

    choices, races = _decide(monkeypatch, own_wins, budget_seconds=0.0)
    assert races == []
    assert {choice.algorithm for choice in choices} == {"backend"}


def _below(**medians: float) -> select._Race:
    """A race at 1 MiB that took these seconds."""
    return select._Race(2**20, {}, medians)


def test_fewer_take_part_where_time_is_short() -> None:
    ranked = [
        PricedAlgorithm(name, 1, seconds, False)
        for name, seconds in (("exchange", 1.0), ("direct", 1.2), ("torus", 1.2), ("hierarchical", 1.5))
    ]
    ranked += [
        PricedAlgorithm("backend", 1, 2.0, True),
        PricedAlgorithm("ring", 1, 2.1, False),
        PricedAlgorithm("halving_doubling", 1, 5.1, False),
    ]

    def names(share: float, left: float, below: select._Race | None = None) -> list[str]:
        return [one.algorithm for one in select._candidates(ranked, 8 * 2**20, share, left, below)]

    # All but the same (torus has direct's price) and the hopeless, if each can run four times.
    everyone = ["exchange", "direct", "hierarchical", "ring", "backend"]
    assert names(4 * 7.81, 100) == everyone
    assert names(4 * 7.7, 100) == ["exchange", "direct", "hierarchical", "backend"]
    assert names(1, 5.7) == ["exchange", "direct", "hierarchical", "backend"]  # three may run just once
    assert names(1, 5) == ["exchange", "direct", "backend"]
    assert names(1, 3) == ["exchange", "backend"]
    assert names(1, 2.9) == []
    # The size below took longer than this one is priced: at least that is expected.
    assert names(1, 7, _below(direct=1.0, backend=3.0)) == ["exchange", "backend"]
    # One slow sample made the price at this size twenty times too high: in proportion to bytes it is less.
    assert names(1, 1.7, _below(exchange=0.1, backend=0.1)) == ["exchange", "backend"]


def test_reasons_name_latency_or_bytes() -> None:
    """A network card per rank, 2 ms apart: short messages save hops, long ones bytes on the column."""
    axes = (AxisCost(2.2e-3, 12e6, 3e-5, name="column", size=4), AxisCost(5e-5, 1.5e9, 2e-5, name="row", size=4))
    calibration = Calibration("4x4", 4, "gloo", axes)
    shape = GridShape((4, 4))
    assert select._cause(calibration, "direct", shape, 100_000) == "4 dependent messages, a flat ring has 30"
    assert select._cause(calibration, "exchange", shape, 25_000) == "2 dependent messages, a flat ring has 30"
    assert select._cause(calibration, "torus", shape, 100_000_000) == (
        "a rank sends 0.38 of the message along the column, 1.88 in a flat ring"
    )


def test_a_corrected_price_can_speak_for_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Own algorithms win at 4 KiB but took many times their price: at 1 MiB that no longer beats the backend."""
    points = (MeasuredPoint("backend", 4096, 0.055), MeasuredPoint("backend", 2**20, 0.06))
    calibration = replace(CALIBRATION, points=points)
    choices, races = _decide(monkeypatch, lambda name, size: 0.06 if name == "backend" else 0.05, 0.3, calibration)
    assert [size for size, _ in races] == [4096]
    assert choices[0].algorithm != "backend"
    assert choices[2].algorithm == "backend"
    assert choices[2].reason.endswith("the price corrected at 4 KiB has nothing faster")


def _reduce(rank: int, folder: str) -> dict[str, Any]:
    """Auto on real ranks, its choice left to the machine; the results must be right whatever it is."""
    told: dict[str, Any] = {"records": []}
    handler = logging.Handler()
    handler.emit = lambda record: told["records"].append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megabatch.comm.select").addHandler(handler)
    logging.getLogger("megabatch.comm.select").setLevel(logging.INFO)
    grid = ProcessGrid.build("2x2", timeout_seconds=30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "SIZE_CLASSES_BYTES", (4096, 40000))
        patch.setattr(select, "BUDGET_SECONDS", 0.5)
        reducer = AutoReducer(grid, average=True)
    told["choices"] = reducer.choices
    told["means"] = []
    for numel in (0, 1, 1001, 20000):
        tensor = torch.arange(float(numel)) + rank
        reducer.run(tensor)
        told["means"].append(torch.equal(tensor, torch.arange(float(numel)) + 1.5))
    told["picked"] = [reducer.choices.index(reducer.choice_for(size)) for size in (0, 4000, 10_000, 20_000, 10**9)]

    # A file on the main rank counts, also for the others, which name another.
    path = Path(folder) / ("calibration.json" if rank == 0 else "nowhere.json")
    if rank == 0:
        write_calibration_file(path, CALIBRATION)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "calibrate", None)
        told["shared"] = select.shared_calibration(grid, path) == CALIBRATION
    told["errors"] = []
    wrong_grid = Calibration(
        "1x4", 1, "gloo", (AxisCost(0, 1, name="a", size=1), AxisCost(1, 1, ranks_per_link=4, name="b", size=4))
    )
    for bad in (Path(folder) / "missing.json", wrong_grid):
        try:
            select.shared_calibration(grid, bad)
        except ConfigError as error:
            told["errors"].append(str(error))
    return told


def test_all_ranks_choose_alike_and_reduce_rightly(tmp_path: Path) -> None:
    answers = run_ranks(4, _reduce, str(tmp_path))
    records = [told.pop("records") for told in answers]
    assert all(told == answers[0] for told in answers)
    told = answers[0]
    assert told["means"] == [True] * 4
    assert told["picked"] == [0, 0, 0, 1, 1]
    assert told["shared"]
    assert records == [[f"all-reduce of {choice.reason}" for choice in told["choices"]], [], [], []]
    assert "missing.json" in told["errors"][0]
    assert "says nothing about grid 2x2" in told["errors"][1]


def _hook(rank: int) -> list[Any]:
    """The hook with choices forced, so that it is known which of them must keep to one thread."""
    told: list[Any] = []
    for algorithms in (("exchange", "torus"), ("direct", "backend")):
        grid = ProcessGrid.build("2x2", timeout_seconds=30)
        with pytest.MonkeyPatch.context() as patch:
            choices = tuple(
                Choice(size, name, 2**16, 1.0, f"{size}: {name}, as told")
                for size, name in zip((1000, 100_000), algorithms, strict=True)
            )
            patch.setattr(select, "_choices", lambda *_, forced=choices: forced)
            used: set[str] = set()
            run = AllReducer.run

            def noting(self: AllReducer, *args: Any, run: Any = run, used: set[str] = used, **options: Any) -> None:
                used.add(self.algorithm)
                run(self, *args, **options)

            patch.setattr(AllReducer, "run", noting)
            said: list[str] = []
            state, _ = gradient_hook(grid, algorithm="auto", buckets_in_flight=2, say=said.append)
            assert said == (state.explanation if rank == 0 else [])
            sizes = (7, 40_000, 200, 30_001, 1, 50_000)
            futures = [
                state.reduce_buffer(torch.full((numel,), float(rank + index)), index)
                for index, numel in enumerate(sizes)
            ]
            told.append([float(future.wait()[-1]) for future in futures])
            tensor = torch.full((5,), float(rank))
            all_reduce(tensor, grid, "auto")
            told.append((state._count, state.explanation, sorted(used), tensor.tolist()))
            state.close()
    return told


def test_the_hook_takes_auto_and_keeps_the_backend_in_order() -> None:
    for told in run_ranks(4, _hook):
        means = [1.5 + index for index in range(6)]
        assert told[0] == told[2] == means
        count, explanation, used, total = told[1]
        assert count == 2
        assert explanation == ["1000: exchange, as told", "100000: torus, as told"]
        assert used == ["exchange", "torus"]
        assert total == [6.0] * 5
        assert told[3][0] == 1
        assert told[3][2] == ["backend", "direct"]


def _alone(rank: int) -> tuple[str, list[float], str]:
    grid = ProcessGrid.build("1x1", timeout_seconds=10)
    reducer = AutoReducer(grid)
    tensor = torch.ones(3)
    reducer.run(tensor)
    return reducer.explanation[0], tensor.tolist(), ", ".join(reducer.algorithms)


def test_a_single_rank_has_nothing_to_choose() -> None:
    assert run_ranks(1, _alone) == [("a single rank: nothing to reduce", [1.0] * 3, "backend")]
