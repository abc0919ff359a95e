"""The run folder: made once, held by one run at a time, never overwritten by another.

Torch-free, so that a folder that cannot be used is refused before any worker starts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megabatch.config import Config, differences
from megabatch.errors import CheckpointError
from megabatch.files import lock, write_atomically
from megabatch.recipes import config_from_toml

__all__ = ["changes_on_resume", "check_output", "config_of_run", "default_output", "hold"]

# The last worker of a killed run may take a moment to disappear.
_LOCK_SECONDS = 10.0

# Settings that do not change what is computed.
_HARMLESS = (
    "train.threads_per_worker",
    "checkpoint.",
    "comm.algorithm",
    "comm.backend",
    "comm.bucket_mb",
    "comm.max_restarts",
    "comm.timeout_seconds",
    "data.path",
    "data.prefetch_ghosts",
    "train.evaluation_batch_size",
    "reference.",
    "log.",
)

# These do, and may yet change when a run is resumed: how a run goes on further, and how one that diverged is saved.
_FREE_ON_RESUME = ("train.max_steps", "optimizer.lr", "collapse.lr")


def default_output(recipe: str) -> Path:
    """A folder name that no earlier run has: recipe, date and time."""
    name = f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = Path("runs") / name, 2
    while path.exists():
        path, number = Path("runs") / f"{name}-{number}", number + 1
    return path


def config_of_run(folder: Path) -> Config:
    """The settings a run was made with."""
    path = folder / "config.toml"
    if not path.is_file():
        raise CheckpointError(f"'{folder}' is not a run folder (it has no config.toml); give the folder of a run")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"'{path}' cannot be read ({error}); the run folder is damaged") from None
    return config_from_toml(text, source=f"'{path}'")


def check_output(folder: Path, config: Config, resume: bool, *, same_result: bool = False) -> None:
    """Check that the folder is free, or holds this very run when it is to be resumed.

    same_result: refuse also what may change on resume, because the run's result is to stand for these settings.

    Raises:
        CheckpointError: when the folder holds something else; nothing in it is touched.
    """
    if (folder / "config.toml").is_file():
        if not resume:
            raise CheckpointError(
                f"run folder '{folder}' already holds a run; add --resume to go on with it, or choose another --output"
            )
        free = _HARMLESS if same_result else _HARMLESS + _FREE_ON_RESUME
        changed = {
            name: values
            for name, values in differences(config_of_run(folder), config).items()
            if not name.startswith(free)
        }
        if changed:
            name, (theirs, ours) = next(iter(changed.items()))
            more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
            raise CheckpointError(
                f"run folder '{folder}' holds another run: its {name} is {theirs!r}, given {ours!r}{more}; "
                "resume with the settings of that run, or choose another --output"
            )
    elif folder.exists() and (not folder.is_dir() or any(not p.name.startswith(".") for p in folder.iterdir())):
        raise CheckpointError(f"'{folder}' exists and is not a run folder; choose another --output")


def changes_on_resume(folder: Path, config: Config) -> list[str]:
    """What is computed otherwise from here on, for a person; ask before `hold`, which saves the new settings."""
    if not (folder / "config.toml").is_file():
        return []
    changed = differences(config_of_run(folder), config).items()
    lrs = [(name, values) for name, values in changed if name.endswith(".lr")]
    return [f"changed        {name} from here on: {theirs} -> {ours}" for name, (theirs, ours) in lrs]


@contextmanager
def hold(folder: Path, config: Config, resume: bool) -> Iterator[None]:
    """Make or take over the folder, save the settings in it, and keep other runs out while the block lasts.

    The hold ends with this process however it ends.
    """
    check_output(folder, config, resume)
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not stack.enter_context(lock(folder / ".lock", _LOCK_SECONDS)):
                raise CheckpointError(
                    f"run folder '{folder}' is in use by a run that is still going; wait for it or stop it"
                )
            check_output(folder, config, resume)  # again: another run may have come and gone during the wait
            write_atomically(folder / "config.toml", config.to_toml())
            (folder / "summary.json").unlink(missing_ok=True)  # it spoke of an earlier end of the run
        except OSError as error:
            raise CheckpointError(
                f"run folder '{folder}' cannot be written: {error.strerror}; choose another --output"
            ) from None
        yield
