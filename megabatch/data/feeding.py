"""How images are prepared for one worker: by how many lanes, with which decoder, and what becomes of broken ones."""

from __future__ import annotations

from dataclasses import dataclass, field

from megabatch.data.broken import BrokenLog
from megabatch.data.decode import EXACT, Decoding

__all__ = ["Feeding"]


@dataclass(frozen=True)
class Feeding:
    """The ways of a loader; nothing in it changes a pixel but `decoding`."""

    threads: int = 1  # lanes in this process, when there are no processes
    processes: int = 0  # lanes in processes of their own
    decoding: Decoding = EXACT
    broken: BrokenLog = field(default_factory=lambda: BrokenLog(0.0))
