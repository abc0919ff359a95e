"""The slow twin of `allreduce`: the same phases with one blocking message at a time, in an order anybody can follow.

Nothing is posted ahead, nothing overlaps, patterns (ring, direct, ...) do not matter: for every pair of positions
in turn, the one sends and the other receives. It is what the fast path is compared with, and what to read first.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megabatch.comm.grid import ProcessGrid
from megabatch.comm.phases import Phase, num_channels, phases

__all__ = ["reference_all_reduce"]


def reference_all_reduce(tensor: torch.Tensor, grid: ProcessGrid, algorithm: str = "torus") -> None:
    """Sum a 1-D `tensor` over the grid in place by the phases of `algorithm`."""
    phase_list = phases(algorithm, grid.shape)
    channels = num_channels(phase_list)
    for channel in range(channels):
        part = _chunk(tensor, channels, channel)
        outer: list[torch.Tensor] = []
        for phase in phase_list:
            if phase.channel != channel or (phase.leaders and any(grid.coordinates[phase.axis + 1 :])):
                continue
            if phase.operation == "all_gather":
                part = outer.pop()
            _run(phase, part, grid)
            if phase.operation == "reduce_scatter":
                outer.append(part)
                part = _chunk(part, phase.size, grid.axis_position(phase.axis))


def _run(phase: Phase, part: torch.Tensor, grid: ProcessGrid) -> None:
    positions = range(phase.size)
    me = grid.axis_position(phase.axis)
    if not part.numel():
        return
    terms = {me: part.clone()}
    if phase.operation in ("reduce_scatter", "all_reduce", "exchange", "reduce"):
        for source in positions:
            for target in positions if phase.operation != "reduce" else (0,):
                _message(grid, phase.axis, source, target, part, terms)
        if phase.operation != "reduce" or me == 0:
            total = sum(terms[source] for source in positions)
            assert isinstance(total, torch.Tensor)
            # A reduce-scatter promises only the own chunk; the all-gather overwrites the others.
            part.copy_(total)
    elif phase.operation == "all_gather":
        for source in positions:
            for target in positions:
                _message(grid, phase.axis, source, target, _chunk(part, phase.size, source), terms, in_place=True)
    else:
        for target in positions:
            _message(grid, phase.axis, 0, target, part, terms, in_place=True)


def _message(
    grid: ProcessGrid,
    axis: int,
    source: int,
    target: int,
    part: torch.Tensor,
    terms: dict[int, torch.Tensor],
    *,
    in_place: bool = False,
) -> None:
    """Position `source` sends `part` to `target`, which keeps it in `terms` or writes it over its own `part`."""
    ranks, me, group = grid.axis_ranks(axis), grid.axis_position(axis), grid.group(axis)
    if source == target or not part.numel():
        return
    if me == source:
        dist.send(part, ranks[target], group=group)
    elif me == target:
        arrived = part if in_place else terms.setdefault(source, torch.empty_like(part))
        dist.recv(arrived, ranks[source], group=group)


def _chunk(part: torch.Tensor, pieces: int, index: int) -> torch.Tensor:
    numel = part.numel()
    return part[numel * index // pieces : numel * (index + 1) // pieces]
