"""What `megabatch train` is asked to do, as plain values that can be sent to workers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megabatch.config import Config


@dataclass(frozen=True)
class Elastic:
    """What an elastic run is asked to do.

    lighthouse: HOST:PORT; empty: one of our own, for local workers. way: where workers of this host find it.
    """

    lighthouse: str = ""
    way: str = ""
    min_workers: int = 1
    max_workers: int = 0  # 0: any number
    founders: int = 1  # workers that begin together, if they come in time
    local_workers: int = 1  # that share this host
    leave_on: tuple[str, ...] = ("SIGTERM",)  # signals that take a worker away and let the others go on


@dataclass(frozen=True)
class TrainRequest:
    """A run to be trained by this process, or by workers that it starts."""

    config: Config
    output: Path | None = None
    grid: str | None = None
    resume: bool = False
    debug: bool = False
    plan: str = ""
    name: str = "run"  # of the default run folder
    lines: tuple[str, ...] = ()  # to be said before the run
    elastic: Elastic | None = None
