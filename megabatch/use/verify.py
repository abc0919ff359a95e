"""Compute a stretch of a run again and compare bits: the digests of its weights, and the losses of its steps.

    checkpoint of step 40 -> steps 41 to 60, on any number of workers, in a temporary folder -> digests of 40, 50 and 60

With exact sums the bits are those of the run, whoever computes them, if threads per worker, processor and versions are
those of the run. Threads are set as environment.json records them; what else differs is said. The run folder is only
read. A run keeps its newest checkpoints alone (`checkpoint.keep`); earlier steps are computed from the start.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megabatch.config import Config
from megabatch.errors import CheckpointError, ConfigError, DataError, LaunchError
from megabatch.files import UnreadableError
from megabatch.recipes import load_config
from megabatch.report.metrics_log import read_metrics
from megabatch.report.run import CONFIG_FILE, ENVIRONMENT_FILE, METRICS_FILE, read_json
from megabatch.report.untrusted import number, read_table, text, whole
from megabatch.train.entry import train
from megabatch.train.run_dir import changed_bits, check_output, config_of_run
from megabatch.workers.local import run_as_worker, start_workers
from megabatch.workers.world import num_accelerators, read_world


class Verification(NamedTuple):
    """What came out. `difference` is empty when the bits are those recorded; `notes` may explain one."""

    line: str
    difference: str
    notes: tuple[str, ...]


class _Row(NamedTuple):
    """What metrics.jsonl says about the bits of a step."""

    loss: float | None
    digest: str


@dataclass(frozen=True)
class _Stretch:
    """What is computed again: the steps after `start`, from this checkpoint or, at step 0, from none."""

    start: int
    checkpoint: Path | None
    data: bytes  # of the checkpoint
    digest_steps: tuple[int, ...]  # what is compared, without that of `start`


def verify_run(
    run: Path,
    steps: str = "",
    workers: int | None = None,
    overrides: tuple[str, ...] = (),
    environ: Mapping[str, str] = os.environ,
    debug: bool = False,
) -> Verification | None:
    """Compute steps a to b of a run again ("a:b"; all that its checkpoints allow by default) and compare.

    workers: local ones to start. overrides: settings that do not change what is computed. Under torchrun, srun or
    mpirun every rank must call it, and only the main rank gets an answer.

    Raises:
        MegabatchError: what cannot be verified, and what to do, in one line.
    """
    first, last = _parse_steps(steps)
    config, rows = _config_of(run, overrides), _read_rows(run, last)
    world = read_world(environ, alone=workers is not None)
    if world is not None:
        world.check_size(workers)
    notes: list[str] = []
    stretch = _choose_stretch(run, config, rows, first, notes)
    if difference := _compare_checkpoint(stretch, rows):
        return _answer(stretch, rows, difference, notes)

    with tempfile.TemporaryDirectory(prefix="megabatch-verify-") as scratch:
        folder = Path(scratch) / "run"
        config = _shortened(config, stretch)
        resume = _prepare(run, folder, config, stretch)
        if world is not None:
            _recompute(config, folder, resume, debug)
        else:
            world_size, restarts = workers or num_accelerators() or 1, config.comm.max_restarts
            signal = start_workers(world_size, _recompute, config, folder, resume, debug, max_restarts=restarts)
            if signal:
                raise LaunchError(
                    f"stopped by signal {signal} on the way to step {stretch.digest_steps[-1]}; try again"
                )
        if world is not None and not world.is_main:
            return None
        environment = read_json(folder / ENVIRONMENT_FILE)
        again = _read_rows(folder, stretch.digest_steps[-1])
    if changed := changed_bits(run, environment):
        notes.append(f"not as in the run: {changed}; bits may differ for that reason")
    then = number((_environment_of(run)).get("workers"))
    if config.comm.sums == "float" and then != environment["workers"]:
        notes.append(f"sums are in floats, and the run had {then:g} workers; bits differ for that reason")
    return _answer(stretch, rows, _compare(stretch, rows, again), notes)


def _parse_steps(steps: str) -> tuple[int | None, float]:
    """The first and the last step that were asked for, None and infinity where nothing was said."""
    match = re.fullmatch(r"(\d{0,15}):(\d{0,15})", steps or ":")
    if match is None:
        raise ConfigError(f"--steps '{steps[:40]}' cannot be read; write FIRST:LAST, for example 40:60, 40: or 0:60")
    first, last = int(match[1]) if match[1] else None, int(match[2]) if match[2] else math.inf
    if last < max(first or 0, 1):
        raise ConfigError(f"--steps '{steps}' ends before it begins; write FIRST:LAST, for example 40:60")
    return first, last


def _read_rows(run: Path, last: float) -> dict[int, _Row]:
    """What metrics.jsonl says about the steps up to `last`."""
    rows: dict[int, _Row] = {}
    for row in read_metrics(run / METRICS_FILE):
        step = whole(row.get("step"), 1, 10**15)
        if step is not None and step <= last:
            rows[step] = _Row(number(row.get("loss")), text(row.get("weights_digest"), 64))
    return rows


def _config_of(run: Path, overrides: tuple[str, ...]) -> Config:
    """The run's settings, changed where that does not change what is computed; with the threads it had."""
    config_of_run(run)  # refuses what is no run
    config = load_config(str(run / CONFIG_FILE), list(overrides))
    check_output(run, config, resume=True, same_result=True)
    threads = whole(_environment_of(run).get("threads_per_worker"), 1, 4096)
    if threads and not any(override.startswith("train.threads_per_worker") for override in overrides):
        config = config.model_copy(update={"train": config.train.model_copy(update={"threads_per_worker": threads})})
    return config


def _environment_of(run: Path) -> dict[str, object]:
    try:
        return read_table(run / ENVIRONMENT_FILE) or {}
    except UnreadableError:
        return {}


def _choose_stretch(run: Path, config: Config, rows: dict[int, _Row], first: int | None, notes: list[str]) -> _Stretch:
    """From the newest checkpoint at or before `first`; when nothing was said, from the oldest one that is there."""
    from megabatch.train.checkpoint import read_whole

    recorded = [step for step, row in sorted(rows.items()) if row.digest]
    if not recorded:
        raise DataError(
            f"'{run}' records no digest of its weights that could be compared; every run writes one at its checkpoints "
            "and every train.digest_every_steps steps: choose other --steps, or another run"
        )
    found = {
        int(path.stem.removeprefix("step-")): path for path in (run / "checkpoints").glob("step-" + "[0-9]" * 8 + ".pt")
    }
    since = _length_since(run, config)
    usable = [step for step in sorted(found) if since <= step < recorded[-1] and (first is None or step <= first)]
    start, checkpoint, data = 0, None, b""
    for step in [] if first == 0 else usable if first is None else reversed(usable):
        try:
            start, checkpoint, data = step, found[step], read_whole(found[step])
            break
        except CheckpointError as error:
            notes.append(str(error))
    if first and checkpoint is None:
        there = f"the oldest is of step {min(found)}" if found else "there is none"
        raise CheckpointError(
            f"'{run}' has no whole checkpoint at or before step {first} to begin from ({there}; the newest "
            f"{config.checkpoint.keep} are kept); --steps 0: begins at the start of the run"
        )
    if start < since:
        raise CheckpointError(
            f"'{run}' was given another length after step {since}, so earlier steps cannot be computed again; "
            f"give --steps {since}: if a checkpoint of that step or a later one is there"
        )
    to_check = tuple(step for step in recorded if step > start)
    if first is not None and not any(step >= first for step in to_check):
        raise DataError(
            f"'{run}' records no digest of its weights at these steps; the last one before is of step {recorded[-1]}; "
            "choose other --steps"
        )
    return _Stretch(start, checkpoint, data, to_check)


def _length_since(run: Path, config: Config) -> int:
    """The step after which the run was given the length it has; 0 when that never changed."""
    from megabatch.train.checkpoint import decode, newest_whole, refusing_damage

    data = newest_whole(run / "checkpoints", say=lambda line: None)
    if data is None:
        return 0
    state = decode(data, str(run))
    with refusing_damage(str(run)):
        clock = state["run"]["trunk_clock"] or state["run"]["clock"]
        planned = round(config.train.epochs * clock["samples_per_epoch"])
        is_new = config.collapse is None and clock["total_samples"] != planned  # nothing has been saved since
        return int(state["run"]["clock"]["steps"] if is_new else state["run"]["length_since_step"])


def _compare_checkpoint(stretch: _Stretch, rows: dict[int, _Row]) -> str:
    """How the weights in the checkpoint differ from those recorded for its step."""
    from megabatch.train.audit import weights_digest
    from megabatch.train.checkpoint import decode, refusing_damage

    recorded = rows[stretch.start].digest if stretch.start in rows else ""
    if stretch.checkpoint is None or not recorded:
        return ""
    state = decode(stretch.data, str(stretch.checkpoint))
    with refusing_damage(str(stretch.checkpoint)):
        found = weights_digest(state["model"], state["statistics"])
    if found == recorded:
        return ""
    return f"the checkpoint of step {stretch.start} holds {_short(found)}, {_short(recorded)} is recorded for that step"


def _shortened(config: Config, stretch: _Stretch) -> Config:
    """The same computation up to the last digest, without what does not change the weights."""
    steps = stretch.digest_steps
    changes = {
        "train": {
            "max_steps": steps[-1],
            "digest_every_steps": math.gcd(*steps),
            "audit_every_steps": 0,
            "evaluate_every_epochs": 0.0,
        },
        "checkpoint": {"every_epochs": 0.0, "every_steps": 0},
        "log": {"to": ()},
    }
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
    return config.model_copy(update=sections)


def _prepare(run: Path, folder: Path, config: Config, stretch: _Stretch) -> bool:
    """Make a folder in which the run can go on from the checkpoint; whether there is one."""
    if stretch.checkpoint is None:
        return False
    checkpoints, members = folder / "checkpoints", folder / "members"
    checkpoints.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(config.to_toml(), encoding="utf-8")
    (checkpoints / stretch.checkpoint.name).write_bytes(stretch.data)
    checksum = hashlib.sha256(stretch.data).hexdigest()
    (checkpoints / f"{stretch.checkpoint.name}.sha256").write_text(checksum, encoding="ascii")
    members.mkdir()
    for member in (run / "members").glob("*.safetensors"):  # the last one may become the model of the run
        (members / member.name).symlink_to(member.resolve())
    return True


def _recompute(config: Config, folder: Path, resume: bool, debug: bool) -> int:
    """What a worker does."""
    world = read_world(os.environ)
    assert world is not None

    def work() -> int:
        train(config, output=folder, resume=resume)
        return 0

    return run_as_worker(work, world, os.environ, debug)


def _compare(stretch: _Stretch, rows: dict[int, _Row], again: dict[int, _Row]) -> str:
    """Where the bits differ first; empty when they do not."""
    wrong = [step for step in stretch.digest_steps if step not in again or again[step].digest != rows[step].digest]
    losses = [step for step, row in sorted(rows.items()) if step in again and again[step].loss != row.loss]
    parts = []
    if wrong:
        found = _short(again[wrong[0]].digest) if wrong[0] in again else "nothing"
        parts.append(
            f"first in the weights after step {wrong[0]}: {found}, {_short(rows[wrong[0]].digest)} is recorded"
        )
        if len(wrong) < len(stretch.digest_steps):
            parts.append(f"{len(stretch.digest_steps) - len(wrong)} of {len(stretch.digest_steps)} digests agree")
    if losses:
        parts.append(
            f"the first loss that differs is that of step {losses[0]}: {again[losses[0]].loss!r}, "
            f"{rows[losses[0]].loss!r} is recorded"
        )
    elif wrong:
        parts.append("all losses agree")
    return "; ".join(parts)


def _answer(stretch: _Stretch, rows: dict[int, _Row], difference: str, notes: list[str]) -> Verification:
    of_start = stretch.start in rows and bool(rows[stretch.start].digest)
    count, steps = len(stretch.digest_steps) + of_start, f"steps {stretch.start} to {stretch.digest_steps[-1]}"
    same = f"the bits are those recorded: {steps}, {count} digest{'s' if count > 1 else ''}"
    return Verification(f"the bits differ: {difference}" if difference else same, difference, tuple(notes))


def _short(digest: str) -> str:
    return digest[:12]
