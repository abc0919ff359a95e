"""The errors a user can meet.

    MegabatchError
    |-- ConfigError         a recipe, a key or a value that cannot work
    |-- GridError           a process grid that does not fit the world
    |-- DataError           images or labels that are missing, unreadable or wrong
    |-- WriteError          a file that cannot be written: no such folder, no permission, a full disk
    |-- CheckpointError     a run folder or checkpoint that does not fit this run
    |-- LaunchError         a world of workers that cannot be formed or joined
    |-- CommunicationError  workers that stopped answering
    |   `-- DisagreementError   workers that disagree about what is exchanged
    `-- TrainingError       a training that cannot go on (non-finite gradients)

Every message is one line with three parts: what was given, what is needed, what to do. `assert` is for our own
mistakes only.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

__all__ = [
    "CheckpointError",
    "CommunicationError",
    "ConfigError",
    "DataError",
    "DisagreementError",
    "GridError",
    "LaunchError",
    "MegabatchError",
    "TrainingError",
    "WriteError",
    "complaint",
    "first_line",
    "nearest",
    "some_names",
]

_MOST_NAMES = 10


class MegabatchError(Exception):
    """Anything a user can cause or must know; the command line prints it as one line and exits with 2."""


class ConfigError(MegabatchError):
    """A recipe, a key or a value that cannot work."""


class GridError(MegabatchError):
    """A process grid that does not fit the world."""


class DataError(MegabatchError):
    """Images or labels that are missing, unreadable or wrong."""


class WriteError(MegabatchError):
    """A file that cannot be written: no such folder, no permission, a full disk."""


class CheckpointError(MegabatchError):
    """A run folder or checkpoint that does not fit this run."""


class LaunchError(MegabatchError):
    """A world of workers that cannot be formed or joined."""


class CommunicationError(MegabatchError):
    """Workers that stopped answering."""


class DisagreementError(CommunicationError):
    """Workers that disagree about what is exchanged: they would again."""


class TrainingError(MegabatchError):
    """A training that cannot go on."""


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known word closest to `word`, or an empty string when none is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""


def complaint(error: ValidationError) -> tuple[str, str]:
    """The first complaint of pydantic: the dotted key, and what is wrong with its value."""
    first = error.errors()[0]
    reason = first["msg"].removeprefix("Value error, ")
    return ".".join(map(str, first["loc"])), f"{reason[0].lower()}{reason[1:]}"


def some_names(names: Sequence[str]) -> str:
    """The first names of a list, for a message of one line: "'a', 'b' and 7 more"."""
    rest = len(names) - _MOST_NAMES
    return ", ".join(f"'{name}'" for name in names[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def first_line(error: Exception) -> str:
    """The kind of an error and the first line of what it says: for messages about errors of other people's code."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
