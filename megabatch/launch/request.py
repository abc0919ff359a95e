"""What a script for a cluster needs to know, checked once, and how the script is handed over. Imports no torch.

Every text that goes into a script passes through `word` (shell) or `plain` (a scheduler's own lines): a name with a
space, a quote or a newline in it is quoted or refused, never pasted.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from megabatch.comm.shape import parse_grid
from megabatch.errors import ConfigError
from megabatch.files import write_atomically
from megabatch.recipes import load_config

__all__ = ["LaunchRequest", "check_recipe", "folder_of", "hand_over", "plain", "torchrun_words", "train_words", "word"]


@dataclass(frozen=True)
class LaunchRequest:
    """A run on `nodes` machines with `workers_per_node` workers each.

    gpus_per_node 0: workers compute on cores. grace_seconds: how long before its end a job is told to stop.
    """

    recipe: str
    output: str
    nodes: int
    workers_per_node: int
    name: str = "megabatch"
    data: str = ""
    overrides: tuple[str, ...] = ()
    grid: str = ""
    gpus_per_node: int = 0
    cores_per_worker: int = 0  # 0: leave it to the scheduler
    time_limit: str = ""
    grace_seconds: int = 120
    python: str = "python"
    health_check: bool = True

    def __post_init__(self) -> None:
        if self.gpus_per_node not in (0, self.workers_per_node):
            raise ConfigError(
                f"{self.gpus_per_node} GPUs and {self.workers_per_node} workers per node; "
                "give one worker per GPU, or no GPUs"
            )
        if not re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,60}[A-Za-z0-9])?", self.name):
            raise ConfigError(f"name '{self.name}'; use letters, digits, '-', '_' and '.', at most 62 of them")
        if not self.output:
            raise ConfigError("--output is empty; give the run folder, on a disk that all machines share")

    @property
    def world_size(self) -> int:
        return self.nodes * self.workers_per_node


def word(text: str) -> str:
    """One word of a shell command."""
    if "\0" in text or "\n" in text or "\r" in text:
        raise ConfigError(f"{text!r} has a line break in it, which no script can carry; give it without")
    return shlex.quote(text)


def plain(text: str, what: str) -> str:
    """A value on a scheduler's own line, where no quoting exists."""
    if not re.fullmatch(r"[-A-Za-z0-9_.,:/@%+=]+", text):
        raise ConfigError(
            f"{what} '{text}' has characters that a job script cannot carry; use letters, digits and -_.,:/@%+="
        )
    return text


def torchrun_words(request: LaunchRequest) -> list[str]:
    """torchrun on one machine: it hands the signals on and waits for its workers' checkpoint."""
    signals = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    words = ["-m", "torch.distributed.run", "--nproc-per-node", str(request.workers_per_node)]
    return [*words, "--signals-to-handle", signals, "--shutdown-timeout", str(request.grace_seconds)]


def train_words(request: LaunchRequest) -> list[str]:
    """`train RECIPE ...` as the workers are to run it: always with --resume, which also starts a run that is new."""
    words = ["train", request.recipe, "--output", request.output, "--resume"]
    words += ["--data", request.data] if request.data else []
    words += ["--grid", request.grid] if request.grid else []
    for override in request.overrides:
        words += ["--set", override]
    return words


def folder_of(request: LaunchRequest) -> str:
    """Where the run folder stands; logs go beside it."""
    return str(PurePosixPath(request.output).parent)


def check_recipe(request: LaunchRequest) -> None:
    """A recipe, an override or a grid that cannot work is told here, not hours later on the cluster.

    A file that only the cluster has cannot be checked: it must be given by an absolute path.
    """
    recipe = request.recipe
    if not (recipe.endswith(".toml") and recipe.startswith("/") and not Path(recipe).exists()):
        load_config(recipe, list(request.overrides))
    if request.grid:
        parse_grid(request.grid).check_fits(request.world_size)


def hand_over(text: str, file: Path | None) -> None:
    """Print the text, or write the file and say so."""
    if file is None:
        print(text, end="")
        return
    write_atomically(file, text)
    print(f"written        {file}")
