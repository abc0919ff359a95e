"""The run folder: made once, held by one run at a time, never overwritten by another.

Torch-free, so that a folder that cannot be used is refused before any worker starts.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megabatch.config import Config, differences
from megabatch.errors import CheckpointError
from megabatch.files import UnreadableError, flatten, lock, read_text, write_atomically
from megabatch.recipes import config_from_toml
from megabatch.recipes.scale import over_epochs
from megabatch.report.metrics_log import read_metrics
from megabatch.report.run import CLASSES_FILE, CONFIG_FILE, ENVIRONMENT_FILE, METRICS_FILE, SUMMARY_FILE
from megabatch.report.untrusted import items, number, read_table, text, whole

# The last worker of a killed run may take a moment to disappear.
LOCK_SECONDS = 10.0
_NUMBER = re.compile(r"-?\d+\.?\d*(?:[eE][+-]?\d+)?")

# Settings that do not change what is computed.
_HARMLESS = (
    "train.threads_per_worker",
    "checkpoint.",
    "comm.algorithm",
    "comm.backend",
    "comm.bucket_mb",
    "comm.shared_memory",
    "comm.max_restarts",
    "comm.timeout_seconds",
    "comm.hang_seconds",
    "comm.wait_seconds",
    "data.path",
    "data.prefetch_ghosts",
    "data.loader_threads",
    "data.loader_processes",
    "train.evaluation_batch_size",
    "train.digest_every_steps",
    "train.audit_every_steps",
    "reference.",
    "log.",
)

# What the last bits of a ghost batch's gradient depend on, as environment.json records it.
_OF_BITS = (
    *("arithmetic.", "device", "threads_per_worker"),
    *("versions.megabatch", "versions.numpy", "versions.pillow", "versions.torch"),
)

# These do, and may yet change when a run is resumed: how a run goes on further, and how one that diverged is saved.
_FREE_ON_RESUME = ("train.max_steps", "optimizer.lr", "collapse.lr")

# Beside train.epochs, with everything that is stretched with it.
_FREE_AT_LENGTH = (*_HARMLESS, "train.max_steps")


def default_output(recipe: str) -> Path:
    """A folder name that no earlier run has: recipe, date and time."""
    name = f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = Path("runs") / name, 2
    while path.exists():
        path, number = Path("runs") / f"{name}-{number}", number + 1
    return path


def is_default_output(name: str, recipe: str) -> bool:
    """Whether `default_output` could have made this name of a folder."""
    return re.fullmatch(rf"{re.escape(recipe)}-\d{{8}}-\d{{6}}(-\d+)?", name) is not None


def config_of_run(folder: Path) -> Config:
    """The settings a run was made with."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise CheckpointError(f"'{folder}' is not a run folder (it has no config.toml); give the folder of a run")
    try:
        text = read_text(path)
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be read ({error}); the run folder is damaged") from None
    if not text.strip():  # an empty recipe would be one of defaults
        raise CheckpointError(f"'{path}' is empty; the run folder is damaged")
    return config_from_toml(text, source=f"'{path}'")


def member_file(member: int) -> str:
    """Where the weights of a member of a collapsed ensemble lie in the run folder, one for each branch."""
    return f"members/member-{member}.safetensors"


def write_member(folder: Path, member: int, weights: bytes) -> None:
    """Save the weights of a member."""
    (folder / "members").mkdir(exist_ok=True)
    write_atomically(folder / member_file(member), weights)


def member_paths(folder: Path) -> list[Path]:
    """The members of a run, in the order in which they were made."""
    paths = (folder / "members").glob("member-*.safetensors")
    numbered = [path for path in paths if path.stem.rpartition("-")[2].isdecimal()]
    return sorted(numbered, key=lambda path: int(path.stem.rpartition("-")[2]))


@dataclass(frozen=True)
class Recorded:
    """A run that is to go on as it was: its folder, and the local workers and grid it had last."""

    folder: Path
    recipe: str
    workers: int | None = None
    grid: str | None = None


def recorded_run(folder: Path) -> Recorded | None:
    """What a run folder says of itself, None for what is none; workers of a cluster are the launcher's affair."""
    if not (folder / CONFIG_FILE).is_file():
        return None
    recipe = str(folder / CONFIG_FILE)
    try:
        environment = read_table(folder / ENVIRONMENT_FILE) or {}
    except UnreadableError:
        return Recorded(folder, recipe)
    workers = whole(environment.get("workers"), low=1, high=10_000)
    sizes = [whole(size, low=1, high=10_000) for size in items(environment.get("grid"), 2)]
    if environment.get("launcher") != "megabatch" or workers is None or None in sizes or not sizes:
        return Recorded(folder, recipe)
    return Recorded(folder, recipe, workers, "x".join(map(str, sizes)))


def status_of(folder: Path) -> str:
    """How the run in a folder has ended: "finished", "stopped", or empty when it has not, or nobody can tell."""
    with suppress(UnreadableError):
        return text((read_table(folder / SUMMARY_FILE) or {}).get("status"), 20)
    return ""


def check_output(folder: Path, config: Config, resume: bool, *, same_result: bool = False) -> None:
    """Check that the folder is free, or holds this very run when it is to be resumed.

    same_result: refuse also what may change on resume, because the run's result is to stand for these settings.

    Raises:
        CheckpointError: when the folder holds something else; nothing in it is touched.
    """
    if (folder / CONFIG_FILE).is_file():
        if not resume:
            raise CheckpointError(
                f"run folder '{folder}' already holds a run; add --resume to go on with it, or choose another --output"
            )
        before, free = config_of_run(folder), _HARMLESS if same_result else _HARMLESS + _FREE_ON_RESUME
        changed, hint = _differing(before, config, free), ""
        if "train.epochs" in changed and not same_result:
            hint = "; its length alone is changed by --epochs"
            stretched = _differing(_at_length(folder, before, config.train.epochs), config, _FREE_AT_LENGTH)
            if all(_is_close(*both) for both in stretched.values()):
                return
        if changed:
            name, (theirs, ours) = next(iter(changed.items()))
            more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
            raise CheckpointError(
                f"run folder '{folder}' holds another run: its {name} is {theirs!r}, given {ours!r}{more}{hint}; "
                "resume with the settings of that run, or choose another --output"
            )
    elif folder.exists() and (not folder.is_dir() or any(not p.name.startswith(".") for p in folder.iterdir())):
        raise CheckpointError(f"'{folder}' exists and is not a run folder; choose another --output")


def _differing(before: Config, now: Config, free: tuple[str, ...]) -> dict[str, tuple[Any, Any]]:
    """The settings that differ and are not free to."""
    return {name: both for name, both in differences(before, now).items() if not name.startswith(free)}


def _is_close(one: Any, other: Any) -> bool:
    """Whether values are equal but for the rounding of their numbers: stretching twice rounds otherwise than once."""
    texts = [json.dumps(value, sort_keys=True) for value in (one, other)]
    forms, numbers = zip(*((_NUMBER.sub("0", text), _NUMBER.findall(text)) for text in texts), strict=True)
    pairs = zip(*numbers, strict=True) if forms[0] == forms[1] else ()
    return forms[0] == forms[1] and all(math.isclose(float(left), float(right), rel_tol=1e-9) for left, right in pairs)


def _at_length(folder: Path, config: Config, epochs: float) -> Config:
    """The settings of a run that is to go on to another length: stretched as `--epochs` stretches a recipe.

    Raises:
        CheckpointError: it has been trained for longer, or what it did at an epoch cannot be moved any more.
    """
    if config.collapse is not None or config.train.reset_momentum_at_epochs:
        raise CheckpointError(
            f"run folder '{folder}' has branches or momentum resets, whose epochs cannot be moved when they are over: "
            f"its length stays {config.train.epochs:g} epochs; start a new run with --epochs {epochs:g}"
        )
    trained = 0.0
    if (folder / METRICS_FILE).is_file():
        for row in read_metrics(folder / METRICS_FILE):
            trained = number(row.get("epoch")) or 0.0
    if epochs < trained:
        raise CheckpointError(
            f"run folder '{folder}' has been trained for {trained:.4g} epochs, more than the {epochs:g} given; "
            "give more --epochs, or choose another --output"
        )
    return over_epochs(config, epochs)


def changed_bits(folder: Path, environment: dict[str, Any]) -> str:
    """What bits depend on and is not as in the run's environment.json; empty when all is, or when it cannot be read."""
    try:
        before = dict(flatten(read_table(folder / ENVIRONMENT_FILE) or {}, max_depth=2))
    except UnreadableError:
        return ""
    now = dict(flatten(environment, max_depth=2))
    return ", ".join(
        f"{name} {text(before.get(name), 60) or 'unset'} -> {text(now.get(name), 60) or 'unset'}"
        for name in sorted(before.keys() | now.keys() if before else ())
        if name.startswith(_OF_BITS) and before.get(name) != now.get(name)
    )


def changes_on_resume(folder: Path, config: Config, environment: dict[str, Any]) -> list[str]:
    """What is computed otherwise from here on, for a person; ask before `hold`, which saves the new settings.

    environment: what the new environment.json will say.
    """
    if not (folder / CONFIG_FILE).is_file():
        return []
    before = config_of_run(folder)
    if (old := before.train.epochs) != config.train.epochs:
        lines = [f"changed        {old:g} -> {config.train.epochs:g} epochs: every schedule is stretched, from here on"]
    else:
        lrs = [(name, values) for name, values in differences(before, config).items() if name.endswith(".lr")]
        lines = [f"changed        {name} from here on: {theirs} -> {ours}" for name, (theirs, ours) in lrs]
    if bits := changed_bits(folder, environment):
        lines.append(f"changed        {bits}: the last bits may differ from here on")
    return lines


def digest_of(config: Config, *facts: object) -> str:
    """A short digest of all settings that change what is computed, and of further facts that do."""
    settings = dict(flatten(config.model_dump(mode="json")))
    told = {name: value for name, value in settings.items() if not name.startswith(_HARMLESS)}
    content = json.dumps([sorted(told.items()), [str(fact) for fact in facts]])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


@contextmanager
def hold(folder: Path, config: Config, resume: bool) -> Iterator[None]:
    """Make or take over the folder, save the settings in it, and keep other runs out while the block lasts.

    The hold ends with this process however it ends.
    """
    check_output(folder, config, resume)
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not stack.enter_context(lock(folder / ".lock", LOCK_SECONDS)):
                raise CheckpointError(
                    f"run folder '{folder}' is in use by a run that is still going; wait for it or stop it"
                )
            check_output(folder, config, resume)  # again: another run may have come and gone during the wait
            write_atomically(folder / CONFIG_FILE, config.to_toml())
            for name in (SUMMARY_FILE, CLASSES_FILE):  # they spoke of an earlier end of the run
                (folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"run folder '{folder}' cannot be written: {error.strerror}; choose another --output"
            ) from None
        yield
