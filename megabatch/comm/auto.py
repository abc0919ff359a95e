"""`algorithm="auto"`: measures the grid, chooses an algorithm per message size, and proves each choice before using it.

Prices rank the algorithms; then those that could be best - of short messages nearly all, as running them costs little -
and the backend's own all-reduce run on buffers of each size class, in turns: first all of them a few times, then the
fastest more often. The smallest median wins - by at least 5 % over the backend, or the backend stays.

A size whose proof would exceed the time allowed is decided by prices, each corrected by what measuring gave at the size
below - but only among algorithms tried there, and only if the backend lost there; otherwise it stays with the backend.

All decisions rest on rank 0's calibration and on times gathered from all ranks, so every rank decides alike.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from megabatch.comm.allreduce import AllReducer
from megabatch.comm.calibration import Calibration, calibration_from_text, calibration_text, read_calibration
from megabatch.comm.grid import ProcessGrid
from megabatch.comm.measure import calibrate, from_rank_0, probe_device, race
from megabatch.comm.price import DEFAULT_SEGMENT_BYTES
from megabatch.comm.select import (
    BACKEND_MARGIN,
    SIZE_CLASSES_BYTES,
    Choice,
    Prediction,
    choose,
    predictions,
    size_class,
    size_text,
)
from megabatch.errors import ConfigError

__all__ = ["AutoReducer", "proven_choices", "shared_calibration"]

_log = logging.getLogger(__name__)

_PROOF_SECONDS = 12.0
_MAX_RIVALS = 3
_RIVAL_FACTOR = 1.6
_LONG_WEIGHT = 5.0
_DRAW = 0.02
_DRAW_OF_FEW = 0.05
_FEW_ROUNDS = 4
_SHORT_BYTES = 2 * 2**20
_SHORT_RIVAL_FACTOR = 5.0
_SAME_PRICE = 1.001
_HEAT_ROUNDS = 3
_FINAL_FACTOR = 1.3
_MAX_ROUNDS = 60
_CHEAP_SHARE = 1 / 8


@dataclass(frozen=True, slots=True)
class _Proof:
    """What running gave at one size: the choice, seconds by algorithm, and seconds measured per second predicted."""

    choice: Choice
    seconds: dict[str, float]
    corrections: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Race:
    """Median seconds by algorithm, from how many rounds, and all the seconds they took."""

    medians: dict[str, float]
    rounds: int
    spent_seconds: float


class AutoReducer:
    """Reduces each message by what was chosen for its size; takes the place of an `AllReducer`.

    The choice is made once per grid, by the first of these that is built; all ranks must build it together.
    calibration: a file or measurements to rank the algorithms by; by default the grid is measured (about 2 s). Either
    way the proof follows, within about `proof_seconds`. `choices` tells what was chosen, smallest size first, and
    `explanation` why; rank 0 also logs it.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        *,
        average: bool = False,
        grad_dtype: torch.dtype | None = None,
        calibration: Calibration | str | Path | None = None,
        sizes: Sequence[int] = SIZE_CLASSES_BYTES,
        proof_seconds: float = _PROOF_SECONDS,
    ) -> None:
        self.grid = grid
        self.algorithm = "auto"
        self.grad_dtype = grad_dtype
        key = ("auto choices", tuple(sizes))
        if key not in grid.kept:
            grid.kept[key] = _choices(grid, calibration, sizes, proof_seconds)
        self.choices: tuple[Choice, ...] = grid.kept[key]
        self._by_size: dict[int, Choice] = {choice.message_bytes: choice for choice in self.choices}
        self._reducers: dict[tuple[str, int], AllReducer] = {
            (choice.algorithm, choice.segment_bytes): AllReducer(
                grid,
                choice.algorithm,
                average=average,
                grad_dtype=grad_dtype,
                segment_bytes=choice.segment_bytes,
            )
            for choice in self.choices
        }

    @property
    def algorithms(self) -> frozenset[str]:
        """The algorithms in use."""
        return frozenset(choice.algorithm for choice in self.choices)

    @property
    def explanation(self) -> list[str]:
        """One line per size class: what is used and why."""
        return [choice.reason for choice in self.choices]

    def choice_for(self, message_bytes: int) -> Choice:
        """What is used for a message of this size on the wire."""
        return self._by_size[size_class(message_bytes, tuple(self._by_size))]

    def run(
        self, tensor: torch.Tensor, *, task: str = "all-reduce", call: int | None = None
    ) -> list[tuple[str, float]]:
        """As `AllReducer.run`."""
        choice = self.choice_for(tensor.numel() * (self.grad_dtype or tensor.dtype).itemsize)
        return self._reducers[choice.algorithm, choice.segment_bytes].run(tensor, task=task, call=call)


def shared_calibration(grid: ProcessGrid, calibration: Calibration | str | Path | None = None) -> Calibration:
    """Rank 0's calibration on every rank: the one given, or read from a file, or measured now.

    Raises:
        ConfigError: on every rank, when rank 0 cannot read the file or it is of another grid.
    """
    if calibration is None:
        return calibrate(grid)
    error = text = ""
    if grid.rank == 0:
        try:
            known = calibration if isinstance(calibration, Calibration) else read_calibration(calibration)
            known.links(grid.shape)
            text = calibration_text(known)
        except ConfigError as problem:
            error = str(problem)
    if error := from_rank_0(grid, error):
        raise ConfigError(error)
    return calibration_from_text(from_rank_0(grid, text), "rank 0's calibration")


def proven_choices(
    grid: ProcessGrid,
    calibration: Calibration,
    sizes: Sequence[int] = SIZE_CLASSES_BYTES,
    *,
    budget_seconds: float = _PROOF_SECONDS,
    device: torch.device | None = None,
) -> tuple[Choice, ...]:
    """A choice per size, smallest first: run on the grid where the budget allows, else derived from the size below."""
    device = device or probe_device(grid)
    choices: list[Choice] = []
    below: _Proof | None = None
    left = budget_seconds
    weights = [1.0 if size <= _SHORT_BYTES else _LONG_WEIGHT for size in sorted(sizes)]
    for index, size in enumerate(sorted(sizes)):
        planned = choose(calibration, grid.shape, size)
        ranked = predictions(calibration, grid.shape, size)
        entrants = _entrants(ranked, size, left, below)
        if not entrants:
            choices.append(_inherited(planned, ranked, below))
            continue
        proof = _prove(grid, entrants, size, left * weights[index] / sum(weights[index:]), device)
        left -= proof.spent_seconds
        seconds = proof.medians
        choices.append(_judged(planned, entrants, proof))
        corrections = {entrant.algorithm: seconds[entrant.algorithm] / entrant.seconds for entrant in entrants}
        below = _Proof(choices[-1], seconds, corrections)
    return tuple(choices)


def _choices(
    grid: ProcessGrid, calibration: Calibration | str | Path | None, sizes: Sequence[int], proof_seconds: float
) -> tuple[Choice, ...]:
    if not sizes:
        raise ConfigError("no message sizes to choose an algorithm for; give at least one, or leave the default")
    if grid.world_size == 1:
        return (Choice(max(sizes), "backend", DEFAULT_SEGMENT_BYTES, 25.0, 0.0, "a single rank: nothing to reduce"),)
    known = shared_calibration(grid, calibration)
    choices = proven_choices(grid, known, sizes, budget_seconds=proof_seconds)
    if grid.rank == 0:
        for choice in choices:
            _log.info("all-reduce of %s", choice.reason)
    return choices


def _entrants(ranked: Sequence[Prediction], size: int, left_seconds: float, below: _Proof | None) -> list[Prediction]:
    """Those that could be best, and the backend last; fewer where time is short, none where it does not do."""
    backend = next(prediction for prediction in ranked if prediction.algorithm == "backend")
    others: list[Prediction] = []
    for prediction in ranked:
        # Equal prices mean equal messages on this grid, as of torus and direct on 2x2: one of them will do.
        is_new = not others or prediction.seconds > _SAME_PRICE * others[-1].seconds
        if prediction.algorithm != "backend" and (is_new or prediction.measured):
            others.append(prediction)
    near = [one for one in others if one.seconds <= _SHORT_RIVAL_FACTOR * others[0].seconds]
    heats = (1 + _HEAT_ROUNDS) * sum(_expected_seconds(one, size, below) for one in near)
    if size > _SHORT_BYTES and heats > _CHEAP_SHARE * left_seconds:
        near = [one for one in near if one.seconds <= _RIVAL_FACTOR * others[0].seconds][:_MAX_RIVALS]
    while near:
        entrants = [*near, backend]
        if sum(_expected_seconds(entrant, size, below) for entrant in entrants) <= left_seconds:
            return entrants
        near.pop()
    return []


def _expected_seconds(entrant: Prediction, size: int, below: _Proof | None) -> float:
    """The prediction, held between what the size below took and that in proportion to the bytes."""
    if below is None:
        return entrant.seconds
    known = below.seconds.get(entrant.algorithm, max(below.seconds.values()))
    return min(max(entrant.seconds, known), known * size / below.choice.message_bytes)


def _prove(
    grid: ProcessGrid, entrants: Sequence[Prediction], size: int, budget_seconds: float, device: torch.device
) -> _Race:
    """Run all entrants on a real buffer a few times, then the fastest and the backend as often as the budget allows."""
    buffer = torch.zeros(size // 4, device=device)
    runs = {
        entrant.algorithm: partial(AllReducer(grid, entrant.algorithm, segment_bytes=entrant.segment_bytes).run, buffer)
        for entrant in entrants
    }
    first = race(grid, runs, 1)
    spent = once = _total(first)
    rounds = min(_HEAT_ROUNDS, int(budget_seconds / max(once, 1e-9)) - 1)
    if rounds < 1:  # so long that warming up does not matter
        return _Race({name: seconds[0] for name, seconds in first.items()}, 1, once)
    times = race(grid, runs, rounds)
    spent += _total(times)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    close = _FINAL_FACTOR * min(medians.values())
    finalists = {name: run for name, run in runs.items() if medians[name] <= close or name == "backend"}
    once = sum(medians[name] for name in finalists)
    more_rounds = min(_MAX_ROUNDS, int((budget_seconds - spent) / max(once, 1e-9)))
    if more_rounds > 0:
        more = race(grid, finalists, more_rounds)
        spent += _total(more)
        medians.update({name: statistics.median(times[name] + seconds) for name, seconds in more.items()})
        rounds += more_rounds
    return _Race(medians, rounds, spent)


def _total(times: dict[str, list[float]]) -> float:
    return sum(sum(seconds) for seconds in times.values())


def _judged(planned: Choice, entrants: Sequence[Prediction], measured: _Race) -> Choice:
    """The fastest entrant as measured - a draw goes to the lower price - or the backend unless it is clearly beaten."""
    seconds = measured.medians
    draw = (1 + (_DRAW_OF_FEW if measured.rounds < _FEW_ROUNDS else _DRAW)) * min(seconds.values())
    best = min(
        (entrant for entrant in entrants if seconds[entrant.algorithm] <= draw), key=lambda entrant: entrant.seconds
    )
    backend = next(entrant for entrant in entrants if entrant.algorithm == "backend")
    if seconds[best.algorithm] >= (1 - BACKEND_MARGIN) * seconds["backend"]:
        best = backend
    others = ", ".join(
        f"{entrant.algorithm} {_milliseconds(seconds[entrant.algorithm])}" for entrant in entrants if entrant != best
    )
    took = seconds[best.algorithm]
    reason = f"{size_text(planned.message_bytes)}: {best.algorithm}, {_milliseconds(took)} measured, against {others}"
    if best.algorithm == planned.algorithm != "backend":
        reason += f"; foreseen: {planned.reason.split(': ', 1)[1]}"
    return replace(
        planned,
        algorithm=best.algorithm,
        segment_bytes=best.segment_bytes,
        predicted_seconds=took,
        reason=reason,
    )


def _inherited(planned: Choice, ranked: Sequence[Prediction], below: _Proof | None) -> Choice:
    """For a size too large to prove: the best corrected price, or the backend if that won below or is no worse."""
    taken = next(prediction for prediction in ranked if prediction.algorithm == "backend")
    cause = "no smaller size was tried either"
    if below is not None:
        where = size_text(below.choice.message_bytes)
        cause = f"it won at {where}"
        if below.choice.algorithm != "backend":
            corrected = [
                replace(prediction, seconds=prediction.seconds * below.corrections[prediction.algorithm])
                for prediction in ranked
                if prediction.algorithm in below.corrections
            ]
            taken = next(prediction for prediction in corrected if prediction.algorithm == "backend")
            best = min(corrected, key=lambda prediction: prediction.seconds)
            cause = f"the price corrected at {where} has nothing faster"
            if best.seconds < (1 - BACKEND_MARGIN) * taken.seconds:
                told = f"{_milliseconds(best.seconds)} against the backend's {_milliseconds(taken.seconds)}"
                taken, cause = best, f"the price corrected at {where} is {told}"
    reason = f"{size_text(planned.message_bytes)}: {taken.algorithm}, not tried (too long for start-up); {cause}"
    return replace(
        planned,
        algorithm=taken.algorithm,
        segment_bytes=taken.segment_bytes,
        predicted_seconds=taken.seconds,
        reason=reason,
    )


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
