"""The rounds of `simulate` played by SimGrid, a simulator that others wrote: a check of our own two engines.

    in step   every rank begins each round with the others; equal rounds are played once, as in `lock_step_seconds`
    free      every rank goes on when it can, late ranks and other jobs included, as in `simulate_all_reduce`

SimGrid is optional. Its engine can be made once in a process and ends the process when it dislikes something, so it
lives in a child (`simgrid_child`) that is given JSON and a limited time.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from pathlib import Path
from typing import Any

from benchmarks.simulators.simulate import Round, rounds_of
from megabatch.comm.phases import phases
from megabatch.comm.price import CHAIN_SEGMENTS
from megabatch.comm.shape import GridShape
from megabatch.errors import ConfigError
from megabatch.plan.network import Network

__all__ = ["Answer", "Play", "find_simgrid", "play", "play_of", "simgrid_free_seconds", "simgrid_seconds"]

MOST_TRANSFERS = 300_000
DEBIAN = Path("/usr/lib/python3/dist-packages")

_ROOT = Path(__file__).parents[2]
_CHILD = ("-m", "benchmarks.simulators.simgrid_child")
# Some ten times what a busy core takes.
_START_SECONDS, _TRANSFER_SECONDS = 60.0, 1e-3


@dataclass(frozen=True, slots=True)
class Play:
    """One all-reduce to play. `start_seconds` and `background` are for `free` ones, as in `simulate_all_reduce`."""

    channels: tuple[tuple[Round, ...], ...]
    message_bytes: float
    free: bool = False
    start_seconds: tuple[float, ...] = ()
    background: tuple[tuple[int, int], ...] = ()

    @property
    def num_transfers(self) -> int:
        """How many are played; in step equal rounds count once."""
        return sum(len(one.pairs) * (one.count if self.free else 1) for channel in self.channels for one in channel)


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds of each play, and which SimGrid said so."""

    seconds: tuple[float, ...]
    version: str


def simgrid_seconds(
    network: Network, algorithm: str, shape: GridShape, message_bytes: float, *, chain_segments: int = CHAIN_SEGMENTS
) -> float:
    """Seconds of one all-reduce when all ranks begin each round together.

    Raises:
        ConfigError: SimGrid is missing or failed, the algorithm has several channels, or too many transfers.
    """
    return play(network, [play_of(algorithm, shape, message_bytes, chain_segments)]).seconds[0]


def simgrid_free_seconds(
    network: Network,
    algorithm: str,
    shape: GridShape,
    message_bytes: float,
    *,
    start_seconds: Sequence[float] = (),
    background: Sequence[tuple[int, int]] = (),
    chain_segments: int = CHAIN_SEGMENTS,
) -> float:
    """Seconds until every rank has the result, each going on as soon as it can; see `simulate_all_reduce`."""
    one = dataclasses.replace(
        play_of(algorithm, shape, message_bytes, chain_segments),
        free=True,
        start_seconds=tuple(start_seconds),
        background=tuple(background),
    )
    return play(network, [one]).seconds[0]


def play_of(
    algorithm: str, shape: GridShape, message_bytes: float, chain_segments: int = CHAIN_SEGMENTS, *, free: bool = False
) -> Play:
    """What is played of an algorithm on a grid: the same rounds as in our own simulation."""
    channels = rounds_of(phases(algorithm, shape), shape, chain_segments)
    return Play(tuple(tuple(channel) for channel in channels), message_bytes, free)


def play(network: Network, plays: Sequence[Play], *, most_seconds: float | None = None) -> Answer:
    """Play one after another on one platform, in one child process that gets at most `most_seconds`.

    Raises:
        ConfigError: SimGrid is missing or failed, several channels in step, or too many transfers.
    """
    if any(len(one.channels) > 1 and not one.free for one in plays):
        raise ConfigError("parts of a message that travel side by side have no common rounds; play them free")
    transfers = sum(one.num_transfers for one in plays)
    if transfers > MOST_TRANSFERS:
        raise ConfigError(
            f"SimGrid would have to play {transfers:,} transfers and gets at most {MOST_TRANSFERS:,}; "
            "choose fewer workers, another algorithm or larger buckets"
        )
    if find_simgrid() is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise ConfigError(
            f"SimGrid is not installed for Python {version}; install Debian's python3-simgrid with `make simgrid` "
            "(as root; Python 3.11 on Debian 12), or `pip install simgrid`, which compiles it: see docs/planning.md"
        )
    request = {"network": dataclasses.asdict(network), "plays": [dataclasses.asdict(one) for one in plays]}
    return _ask_child(request, most_seconds or _START_SECONDS + _TRANSFER_SECONDS * transfers)


def find_simgrid() -> ModuleSpec | None:
    """Where Python finds SimGrid, else Debian's module for this very version of Python, else None.

    Debian's is taken by its path: its folder on Python's path would bring Debian's other packages along.
    """
    spec = importlib.util.find_spec("simgrid")
    if spec is not None and spec.origin is not None:  # a mere folder of that name has no origin
        return spec
    for suffix in EXTENSION_SUFFIXES:
        if (path := DEBIAN / f"simgrid{suffix}").is_file():
            return importlib.util.spec_from_file_location("simgrid", path)
    return None


def _ask_child(request: Mapping[str, Any], most_seconds: float) -> Answer:
    try:
        done = subprocess.run(
            [sys.executable, *_CHILD],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=most_seconds,
            check=False,
            cwd=_ROOT,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"SimGrid did not answer within {most_seconds:.0f} s; choose fewer workers") from None
    try:
        # SimGrid may write to stdout as well; the answer is the last line.
        answer = json.loads(done.stdout.strip().rpartition("\n")[2])
        if "error" not in answer:
            return Answer(tuple(answer["seconds"]), answer["version"])
        reason = str(answer["error"])
    except (ValueError, KeyError, TypeError):
        reason = f"its process ended with code {done.returncode}: {_last_words(done.stderr)}"
    raise ConfigError(f"SimGrid failed ({' '.join(reason.split())[:500]}); docs/planning.md names versions that work")


def _last_words(text: str) -> str:
    """What SimGrid calls critical, which a backtrace follows; else the last line."""
    lines = [line for line in text.splitlines() if line.strip()]
    critical = (line.partition("CRITICAL] ")[2] for line in lines if "CRITICAL] " in line)
    return next(critical, lines[-1] if lines else "without a word")
