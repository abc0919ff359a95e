"""Who takes part in an elastic run, as the lighthouse says it to all, and what workers must have in common.

From a roster every worker works out the same order of ranks. What workers must have in common - settings, code, data,
versions, processor - is a table of short texts, so that a worker that differs can be told in what.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megabatch.workers.world import World

NEWCOMER = -1
"""Progress of a worker that has no state of the run yet."""

_SHOWN_PARTS = 3
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class Seat:
    """A worker in a roster, as it describes itself. Values come from the network: `_seat` checks them.

    since: when it became a member, 0 for one that is not yet. progress: see `Membership.ask`. waits_for: how many
    workers it would like to begin with. digest: of its agreement, see `agreement_text`; the agreement itself may be
    left out.
    """

    name: str
    host: str
    store_host: str
    store_port: int
    since: int
    progress: int
    waits_for: int
    digest: str
    agreement: str


@dataclass(frozen=True)
class Roster:
    """Who takes part, in the order of ranks; `key` is different for every answer of the lighthouse."""

    key: int
    seats: tuple[Seat, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(seat.name for seat in self.seats)

    @property
    def hosts(self) -> list[str]:
        return [seat.host for seat in self.seats]

    @property
    def source(self) -> int:
        """The rank that is furthest ahead: it gives its state to those behind it."""
        ahead = max(seat.progress for seat in self.seats)
        return next(rank for rank, seat in enumerate(self.seats) if seat.progress == ahead)

    @property
    def is_beginning(self) -> bool:
        """Nobody has a state of the run yet."""
        return self.seats[self.source].progress == NEWCOMER

    @property
    def is_complete(self) -> bool:
        """Enough are there to begin, or the run goes on already; all who get this roster must come to one answer."""
        return any(seat.since for seat in self.seats) or len(self.seats) >= min(seat.waits_for for seat in self.seats)

    def behind(self) -> list[int]:
        """The ranks that need the state of `source`."""
        ahead = self.seats[self.source].progress
        return [rank for rank, seat in enumerate(self.seats) if seat.progress < ahead]

    def world_of(self, name: str) -> World:
        """Where the worker `name` stands."""
        rank = self.names.index(name)
        host = self.hosts[rank]
        return World(
            rank=rank,
            size=len(self.seats),
            local_rank=self.hosts[:rank].count(host),
            local_size=self.hosts.count(host),
            launcher="elastic",
            meeting_host=self.seats[0].store_host,
            meeting_port=self.seats[0].store_port,
        )


def by_seniority(seats: Iterable[Seat]) -> list[Seat]:
    """Who has been a member for longest comes first: newcomers compare themselves with it."""
    return sorted(seats, key=lambda seat: (seat.since or float("inf"), seat.name))


def agreement_text(parts: Mapping[str, str]) -> str:
    """What a worker says of the settings, code and data it has: equal texts may work together."""
    return json.dumps(dict(sorted(parts.items())))


def digest_of(agreement: str) -> str:
    return hashlib.sha256(agreement.encode()).hexdigest()[:16]


def difference(own: str, theirs: str) -> str:
    """In which parts two agreements differ, for a person."""
    mine, others = _parts(own), _parts(theirs)
    names = [name for name in sorted(mine.keys() | others.keys()) if mine.get(name) != others.get(name)]
    told = [
        f"{name} is {_shown(mine.get(name))} here and {_shown(others.get(name))} there" for name in names[:_SHOWN_PARTS]
    ]
    more = f", and {len(names) - _SHOWN_PARTS} more" if len(names) > _SHOWN_PARTS else ""
    return f"{', '.join(told)}{more}"


def part_of(agreement: str, name: str) -> str:
    """One part of what a worker says; empty when it does not say it."""
    return _parts(agreement).get(name, "")


def _parts(agreement: str) -> dict[str, str]:
    """The parts by name; another version may have written the text."""
    try:
        found = json.loads(agreement)
    except ValueError:
        found = None
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}


def _shown(value: str | None) -> str:
    return "not told" if value is None else f"'{value[:_SHOWN_CHARACTERS]}'"
