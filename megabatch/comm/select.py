"""All-reduce by name, and `algorithm="auto"`: a race between the algorithms on the real grid, for each message size.

The race, for every size from the smallest (`race_choices`):

1. Candidates. Prices (`predictions`) rank the algorithms; what costs over five times the cheapest stays out. Of the
   rest as many take part as can run a few rounds within the time allowed, the cheapest first; the backend always does.
2. Timing. All take turns on a real buffer, a few rounds after one to warm up. Then the two fastest go on until the
   size's share of the budget is spent, and the backend with them unless it took twice as long as the fastest.
3. Choice. The smallest median wins - by at least 5 % over the backend, or the backend stays: a draw is no reason to
   leave what plain DDP does.

A size that would take longer than what is left of the budget is not run. If the backend won at the size below, it
stays; otherwise the prices decide among those that ran there, each corrected by what measuring gave there.

All decisions rest on the main rank's calibration and on times gathered from all ranks, so every rank decides alike.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

from megabatch.comm.allreduce import AllReducer
from megabatch.comm.calibration import (
    Calibration,
    Choice,
    PricedAlgorithm,
    calibration_from_text,
    calibration_text,
    predictions,
    read_calibration,
)
from megabatch.comm.grid import ProcessGrid, Reducer
from megabatch.comm.measure import calibrate, on_main_rank_of, probe_device, race
from megabatch.comm.phases import WORLD, num_steps, phases
from megabatch.comm.price import DEFAULT_SEGMENT_BYTES, all_reduce_seconds
from megabatch.comm.shape import GridShape
from megabatch.text import bytes_text

__all__ = ["all_reduce"]

_log = logging.getLogger(__name__)

SIZE_CLASSES_BYTES = (16 * 2**10, 128 * 2**10, 2**20, 8 * 2**20, 32 * 2**20)
"""Messages are chosen for by the nearest of these, on a scale of ratios."""

BUDGET_SECONDS = 12.0
"""For all races of a grid together."""

BACKEND_MARGIN = 0.05
"""Another algorithm than the backend's must be faster by this part."""

_WORTH_TRYING = 5.0  # times the lowest price: prices are not off by more
_HEAT_ROUNDS = 3  # of all candidates, after one round to warm up
_FINAL_ROUNDS = 60  # at most
_SURE_CANDIDATES = 3  # take part even if they can run but once: prices alone do not tell the best
_LONG_BYTES, _LONG_WEIGHT = 2 * 2**20, 5  # longer messages get so many times the budget of a short one


@dataclass(frozen=True, slots=True)
class _Race:
    """What was timed at one size: the prices and the median seconds of those that ran, by name, and who won."""

    message_bytes: int
    prices: Mapping[str, float]
    medians: Mapping[str, float]

    @property
    def winner(self) -> str:
        return _winner(self.medians)


class AutoReducer:
    """Reduces each message by what was chosen for its size; takes the place of an `AllReducer`.

    The choice is made once per grid, by the first of these that is built; all ranks must build it together.
    calibration: a file or measurements to rank the algorithms by; by default the grid is measured (about 2 s). Either
    way the races follow, within about `BUDGET_SECONDS`. `choices` tells what was chosen, smallest size first, and
    `explanation` why; the main rank also logs it.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        *,
        average: bool = False,
        grad_dtype: torch.dtype | None = None,
        calibration: Calibration | str | Path | None = None,
    ) -> None:
        self.grid = grid
        self.algorithm = "auto"
        self.grad_dtype = grad_dtype
        if not grid.choices:
            grid.choices = _choices(grid, calibration)
        self.choices = grid.choices
        self._reducers = {
            (choice.algorithm, choice.segment_bytes): AllReducer(
                grid, choice.algorithm, average=average, grad_dtype=grad_dtype, segment_bytes=choice.segment_bytes
            )
            for choice in self.choices
        }

    @property
    def algorithms(self) -> frozenset[str]:
        return frozenset(choice.algorithm for choice in self.choices)

    @property
    def explanation(self) -> list[str]:
        """One line per size class: what is used and why."""
        return [choice.reason for choice in self.choices]

    def choice_for(self, message_bytes: int) -> Choice:
        """What is used for a message of this size on the wire: the choice of the nearest size, on a scale of ratios."""
        return min(self.choices, key=lambda choice: abs(math.log(max(1, message_bytes) / choice.message_bytes)))

    def run(self, tensor: torch.Tensor, *, task: str = "all-reduce", call: int | None = None) -> None:
        """As `AllReducer.run`."""
        choice = self.choice_for(tensor.numel() * (self.grad_dtype or tensor.dtype).itemsize)
        self._reducers[choice.algorithm, choice.segment_bytes].run(tensor, task=task, call=call)

    def close(self) -> None:
        """As `AllReducer.close`."""
        for reducer in self._reducers.values():
            reducer.close()


def all_reduce(
    tensor: torch.Tensor,
    grid: ProcessGrid,
    algorithm: str = "torus",
    *,
    average: bool = False,
    grad_dtype: torch.dtype | None = None,
) -> None:
    """Sum (or average) `tensor` over all ranks of `grid`, in place; all ranks must call it in the same order.

    Buffers are cached with the grid. See `AllReducer` for the options and `AllReducer.run` for the errors.
    """
    make = partial(make_reducer, grid, algorithm, average=average, grad_dtype=grad_dtype)
    grid.reducer(make, algorithm, average=average, grad_dtype=grad_dtype).run(tensor)


def make_reducer(
    grid: ProcessGrid,
    algorithm: str,
    *,
    average: bool = False,
    grad_dtype: torch.dtype | None = None,
    calibration: Calibration | str | Path | None = None,
) -> Reducer:
    """The reducer for an algorithm; "auto" measures (or reads `calibration`), races, and sets its own segments."""
    if algorithm == "auto":
        return AutoReducer(grid, average=average, grad_dtype=grad_dtype, calibration=calibration)
    return AllReducer(grid, algorithm, average=average, grad_dtype=grad_dtype)


def shared_calibration(grid: ProcessGrid, calibration: Calibration | str | Path | None = None) -> Calibration:
    """The main rank's calibration on every rank: the one given, or read from a file, or measured now.

    Raises:
        ConfigError: on every rank, when the main rank cannot read the file or it is of another grid.
    """
    if calibration is None:
        return calibrate(grid)

    def checked_text() -> str:
        known = calibration if isinstance(calibration, Calibration) else read_calibration(calibration)
        known.links(grid.shape)
        return calibration_text(known)

    return calibration_from_text(on_main_rank_of(grid, checked_text), "the main rank's calibration")


def race_choices(
    grid: ProcessGrid, calibration: Calibration, sizes: Sequence[int], budget_seconds: float
) -> tuple[Choice, ...]:
    """A choice per size, smallest first: raced where the budget allows, else derived from the size below."""
    ordered = sorted(sizes)
    weights = [_LONG_WEIGHT if size > _LONG_BYTES else 1 for size in ordered]
    choices: list[Choice] = []
    below: _Race | None = None
    left = budget_seconds
    for index, size in enumerate(ordered):
        ranked = predictions(calibration, grid.shape, size)
        share = left * weights[index] / sum(weights[index:])
        candidates = _candidates(ranked, size, share, left, below)
        if candidates:
            medians, spent = _timed(grid, candidates, torch.zeros(size // 4, device=probe_device(grid)), share)
            left -= spent
            below = _Race(size, {one.algorithm: one.seconds for one in candidates}, medians)
            choices.append(_raced(candidates, below, grid.shape, calibration))
        else:
            choices.append(_inherited(size, ranked, below))
    return tuple(choices)


def _choices(grid: ProcessGrid, calibration: Calibration | str | Path | None) -> tuple[Choice, ...]:
    if grid.world_size == 1:
        return (Choice(1, "backend", DEFAULT_SEGMENT_BYTES, 0.0, "a single rank: nothing to reduce"),)
    choices = race_choices(grid, shared_calibration(grid, calibration), SIZE_CLASSES_BYTES, BUDGET_SECONDS)
    if grid.rank == 0:
        for choice in choices:
            _log.info("all-reduce of %s", choice.reason)
    return choices


def _candidates(
    ranked: Sequence[PricedAlgorithm], size: int, share_seconds: float, left_seconds: float, below: _Race | None
) -> list[PricedAlgorithm]:
    """The cheapest that fit into the time, and the backend last; none where not even two fit."""
    backend = _named("backend", ranked)
    others: list[PricedAlgorithm] = []
    for one in ranked:
        # Equal prices mean equal messages on this grid, as of torus and direct on 2x2: one of them will do.
        is_new = not others or not math.isclose(one.seconds, others[-1].seconds, rel_tol=1e-3)
        if one.algorithm != "backend" and (is_new or one.measured):
            others.append(one)
    others = [one for one in others if one.seconds <= _WORTH_TRYING * others[0].seconds]
    while others:
        once = sum(_expected_seconds(one, size, below) for one in (*others, backend))
        fits_heats = (1 + _HEAT_ROUNDS) * once <= share_seconds
        if fits_heats or (len(others) <= _SURE_CANDIDATES and once <= left_seconds):
            return [*others, backend]
        others.pop()
    return []


def _expected_seconds(one: PricedAlgorithm, size: int, below: _Race | None) -> float:
    """The prediction, held between what the size below took and that in proportion to the bytes."""
    if below is None:
        return one.seconds
    known = below.medians.get(one.algorithm, max(below.medians.values()))
    return min(max(one.seconds, known), known * size / below.message_bytes)


def _timed(
    grid: ProcessGrid, candidates: Sequence[PricedAlgorithm], buffer: torch.Tensor, budget_seconds: float
) -> tuple[dict[str, float], float]:
    """(median seconds by name, seconds spent): all candidates a few times, then the best while the budget lasts."""
    reducers = {one.algorithm: AllReducer(grid, one.algorithm, segment_bytes=one.segment_bytes) for one in candidates}
    runs = {name: partial(reducer.run, buffer) for name, reducer in reducers.items()}
    times = race(grid, runs, 1)
    spent = _total(times)
    heats = min(_HEAT_ROUNDS, int(budget_seconds / max(spent, 1e-9)) - 1)
    if heats > 0:  # else a round takes so long that warming up does not matter
        times = race(grid, runs, heats)
        spent += _total(times)
        heat = _medians(times)
        fastest = sorted(runs, key=heat.__getitem__)
        # The backend goes on too, unless it is beaten beyond doubt already.
        backend = ["backend"] if heat["backend"] < 2 * heat[fastest[0]] else []
        finalists = {name: runs[name] for name in dict.fromkeys([*fastest[:2], *backend])}
        once = sum(heat[name] for name in finalists)
        finals = min(_FINAL_ROUNDS, int((budget_seconds - spent) / max(once, 1e-9)))
        if finals > 0:
            more = race(grid, finalists, finals)
            spent += _total(more)
            times |= {name: times[name] + seconds for name, seconds in more.items()}
    for reducer in reducers.values():
        reducer.close()
    return _medians(times), spent


def _winner(seconds: Mapping[str, float]) -> str:
    """The fastest by name; the backend unless it is beaten by `BACKEND_MARGIN`."""
    best = min(seconds, key=seconds.__getitem__)
    return best if seconds[best] < (1 - BACKEND_MARGIN) * seconds["backend"] else "backend"


def _raced(candidates: Sequence[PricedAlgorithm], run: _Race, shape: GridShape, calibration: Calibration) -> Choice:
    """The winner of a race, with the times of all."""
    won = _named(run.winner, candidates)
    took = run.medians[won.algorithm]
    others = ", ".join(f"{one.algorithm} {_ms(run.medians[one.algorithm])}" for one in candidates if one != won)
    reason = f"{bytes_text(run.message_bytes)}: {won.algorithm}, {_ms(took)} measured, against {others}"
    if won.algorithm != "backend" and calibration.axes:
        reason += f"; {_cause(calibration, won.algorithm, shape, run.message_bytes)}"
    return Choice(run.message_bytes, won.algorithm, won.segment_bytes, took, reason)


def _inherited(size: int, ranked: Sequence[PricedAlgorithm], below: _Race | None) -> Choice:
    """For a size too long to run: the winner by corrected prices, or the backend if that won below."""
    seconds = {one.algorithm: one.seconds for one in ranked}
    taken = "backend"
    if below is None:
        cause = "no smaller size was tried either"
    elif below.winner == "backend":
        cause = f"it won at {bytes_text(below.message_bytes)}"
    else:
        seconds = {name: seconds[name] * took / below.prices[name] for name, took in below.medians.items()}
        taken = _winner(seconds)
        result = f"is {_ms(seconds[taken])} against the backend's {_ms(seconds['backend'])}"
        result = result if taken != "backend" else "has nothing faster"
        cause = f"the price corrected at {bytes_text(below.message_bytes)} {result}"
    reason = f"{bytes_text(size)}: {taken}, not tried (too long for start-up); {cause}"
    return Choice(size, taken, _named(taken, ranked).segment_bytes, seconds[taken], reason)


def _cause(calibration: Calibration, name: str, shape: GridShape, message_bytes: int) -> str:
    """What an algorithm saves against a flat ring: messages that wait for one another, or bytes on slow links."""
    links = calibration.links(shape)
    chosen, ring = calibration.phases(name, shape, message_bytes), phases("ring", shape)
    slow = min(shape.axes, key=lambda axis: links[axis].rate(alone=False))
    share = sum(float(phase.sent_share()) for phase in chosen if phase.axis in (slow, WORLD))
    flat = float(ring[0].sent_share())
    latency, whole = (all_reduce_seconds(chosen, shape, links, size) for size in (0, message_bytes))
    if 2 * latency > whole or share >= flat:
        return f"{num_steps(chosen)} dependent messages, a flat ring has {num_steps(ring)}"
    return f"a rank sends {share:.2f} of the message along the {shape.names[slow]}, {flat:.2f} in a flat ring"


def _named(algorithm: str, ranked: Sequence[PricedAlgorithm]) -> PricedAlgorithm:
    return next(one for one in ranked if one.algorithm == algorithm)


def _medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: median(seconds) for name, seconds in times.items()}


def _total(times: Mapping[str, Sequence[float]]) -> float:
    return sum(sum(seconds) for seconds in times.values())


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
