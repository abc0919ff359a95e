"""What a run claims, under which conditions and settings, and how to repeat it: plain rows for the page to show."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from megabatch.files import flatten
from megabatch.report.run import Run, setting
from megabatch.report.untrusted import items, number, table, text
from megabatch.text import count_text, percent_text, seconds_text

MAX_SETTINGS = 2_000
MAX_DEPTH = 8
_ABSENT = "-"


@dataclass(frozen=True, slots=True)
class Tile:
    """One measured number of the claim, and what the recipe's reference says."""

    label: str
    value: str
    detail: str
    reference: str = ""
    is_reached: bool | None = None


def status(run: Run) -> tuple[str, str]:
    """How the run stands, in a word, and whether that is good, bad or neither ("")."""
    word = text(run.summary.get("status"), 30)
    if word == "finished":
        return "finished", "good"
    if word == "stopped":
        return f"stopped by {text(run.summary.get('stopped_by'), 40)}", "bad"
    return ("no result yet", "") if run.metrics.num_rows else ("no step yet", "")


def headline(runs: Sequence[Run]) -> str:
    """The claim in a sentence."""
    if len(runs) > 1:
        best = [(top1, run) for run in runs if (top1 := number(run.summary.get("top1"))) is not None]
        if not best:
            return f"{len(runs)} runs compared"
        top1, run = max(best, key=lambda pair: pair[0])
        return f"{len(runs)} runs compared: {run.name} reached the most, {percent_text(top1)} top-1"
    run = runs[0]
    model = text(setting(run, "model.name"), 60) or "The model"
    top1, seconds = number(run.summary.get("top1")), number(run.summary.get("training_seconds"))
    if top1 is None or seconds is None:
        epoch = run.metrics.points("loss")[-1].epoch if run.metrics.points("loss") else 0.0
        return f"{model} after {epoch:.2f} epochs"
    workers = run.world_size or 1
    plural = "s" if workers > 1 else ""
    return f"{model} reached {percent_text(top1)} top-1 in {seconds_text(seconds)} on {workers:,} worker{plural}"


def tiles(run: Run) -> list[Tile]:
    """Accuracy, time and speed, each against the reference at the recipe's head."""
    summary = {name: number(value) for name, value in run.summary.items()}
    validated = run.metrics.points("val_top1")
    top1, top5, images = (summary.get(name) for name in ("top1", "top5", "val_images"))
    if top1 is None and validated:
        top1 = validated[-1].value
    found = []
    if top1 is not None:
        detail = [f"top-5 {percent_text(top5)}"] if top5 is not None else []
        detail += [f"all {images:,.0f} validation images"] if images else []
        detail += [f"after {count_text(epoch)} epochs"] if (epoch := summary.get("epoch")) else []
        reference = text(setting(run, "reference.accuracy"))
        reached = is_reached(top1, reference) if run.is_finished else None
        found.append(Tile("Top-1 accuracy", percent_text(top1), ", ".join(detail), reference, reached))
    if (seconds := summary.get("training_seconds")) is not None:
        detail = [f"{steps:,.0f} steps"] if (steps := summary.get("steps")) else []
        detail += (
            [f"{seconds_text(wall)} with evaluation and checkpoints"] if (wall := summary.get("wall_seconds")) else []
        )
        time, hardware = (text(setting(run, f"reference.{name}")) for name in ("time", "hardware"))
        reference = f"{time} on {hardware}" if time and hardware else time
        reached = is_in_time(seconds, time) if run.is_finished and _has_reference_workers(run) else None
        found.append(Tile("Training time", seconds_text(seconds), ", ".join(detail), reference, reached))
    speed = run.metrics.quantiles("images_per_second")
    if speed and speed.middle:
        detail = [f"median of {speed.n:,} steps"]
        detail += [f"{count_text(speed.middle / run.world_size)} per worker"] if run.world_size else []
        found.append(Tile("Throughput", f"{count_text(speed.middle)} images/s", ", ".join(detail)))
    return found


def is_reached(top1: float, reference: str) -> bool | None:
    """Whether an accuracy reaches the first percentage of a reference; None when it names none."""
    match = re.search(r"(\d{1,3}(?:\.\d{1,6})?) ?%", reference)
    return None if match is None else 100 * top1 >= float(match[1])


_UNITS = {"s": 1.0, "second": 1.0, "minute": 60.0, "min": 60.0, "hour": 3600.0, "h": 3600.0, "day": 86400.0}


def is_in_time(seconds: float, reference: str) -> bool | None:
    """Whether a time is not above the first time of a reference; None when it names none ("2,512 steps")."""
    match = re.search(r"(?<![\d.,])(\d{1,9}(?:\.\d{1,6})?) ?(second|minute|min|hour|day|s|h)s?\b", reference)
    return None if match is None else seconds <= float(match[1]) * _UNITS[match[2]]


def _has_reference_workers(run: Run) -> bool:
    """A time is compared with that of a reference only on as many workers, where the reference says how many."""
    wanted = number(setting(run, "reference.workers"))
    return wanted is None or wanted == run.world_size


def _recipe(run: Run) -> str:
    """The recipe's name, which the name of a run folder begins with unless the user chose another; and the paper."""
    match = re.fullmatch(r"(.+)-\d{8}-\d{6}(-\d+)?", run.name)
    return ": ".join(filter(None, [match[1] if match else "", text(setting(run, "reference.paper"))]))


def _images(run: Run) -> str:
    """Source, place, counts and size of the images, as far as the run says."""
    counts = {name: number(value) for name, value in table(run.environment.get("data")).items()}
    said = [text(setting(run, "data.source"), 80), text(setting(run, "data.path"), 160)]
    for name, word in (("train_images", "to train"), ("val_images", "to validate"), ("classes", "classes")):
        if (count := counts.get(name)) is not None:
            said.append(f"{count:,.0f} {word}")
    size = number(setting(run, "data.image_size"))
    said.append(f"{size:.0f} x {size:.0f} pixels" if size else "")
    return ", ".join(filter(None, said))


def conditions(run: Run) -> list[tuple[str, str]]:
    """What a reader needs to judge the numbers: machines, versions, grid, batch stages."""
    env, versions = run.environment, table(run.environment.get("versions"))
    hosts = Counter(text(host, 60) for host in items(env.get("hosts"), 100_000))
    shown = ", ".join(f"{host} ({count})" for host, count in sorted(hosts.items())[:6])
    more = f" and {len(hosts) - 6} more" if len(hosts) > 6 else ""
    gradient, grad_dtype = number(env.get("gradient_bytes")), text(setting(run, "comm.grad_dtype"), 20) or "fp32"
    rows = [
        ("recipe", _recipe(run)),
        ("model", text(setting(run, "model.name"), 80)),
        ("images", _images(run)),
        ("workers", f"{run.world_size:,} in a grid of {run.grid_text}" if run.world_size and run.grid_text else ""),
        ("hosts (workers)", shown + more),
        ("device", " ".join(filter(None, [text(env.get("device"), 80), _cores(env)]))),
        ("all-reduce", f"{run.algorithm}, gradients in {grad_dtype}" if run.config else ""),
        ("gradient", f"{gradient / 2**20:.3g} MiB per step" if gradient else ""),
        ("batch stages", text(setting(run, "train.global_batch_size"), 120)),
        ("ghost batch", text(setting(run, "train.ghost_batch_size"), 20)),
        ("epochs", text(setting(run, "train.epochs"), 20)),
        ("optimizer", text(setting(run, "optimizer.name"), 40)),
        ("precision", text(setting(run, "train.precision"), 20)),
        ("seed", text(setting(run, "train.seed"), 30)),
        ("versions", ", ".join(f"{text(k, 30)} {text(v, 40)}" for k, v in sorted(versions.items())[:12])),
        ("system", text(env.get("platform"), 120)),
        ("backend", text(env.get("backend"), 30)),
        ("started by", text(env.get("launcher"), 30)),
        ("commit", text(env.get("commit"), 60)),
        ("skipped steps", count_text(number(run.summary.get("skipped_steps")) or 0.0) if run.summary else ""),
    ]
    return [(name, value) for name, value in rows if value]


def _cores(env: dict[str, Any]) -> str:
    cores, threads = number(env.get("cores")), number(env.get("threads_per_worker"))
    if cores is None:
        return ""
    return f"({cores:.0f} cores per host" + (f", {threads:.0f} threads per worker)" if threads else ")")


def repeat_commands(run: Run) -> list[str]:
    """Commands that make the run and this page again; names of a run are quoted for the shell."""
    folder = shlex.quote(run.name)
    grid = f" --grid {run.grid_text}" if run.grid_text else ""
    workers = f" --workers {run.world_size}" if run.world_size else ""
    lines = [
        f"megabatch train {folder}/config.toml{workers}{grid} --output {folder}-again",
        f"megabatch report {folder} {folder}-again",
    ]
    commit = text(run.environment.get("commit"), 60)
    if re.fullmatch(r"[0-9a-f]{40}(-changed)?", commit):
        changed = "    # files differed from it" if "-" in commit else ""
        lines.insert(0, f"git checkout {commit.removesuffix('-changed')}{changed}")
    return lines


def result_rows(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """A comparison's table of results: headings and one row per run."""
    head = ["run", "status", "top-1", "training time", "images/s", "workers", "all-reduce", "global batch", "epochs"]
    rows = []
    for run in runs:
        top1, seconds, speed = (
            number(run.summary.get(name)) for name in ("top1", "training_seconds", "images_per_second")
        )
        row = [
            run.name,
            status(run)[0],
            percent_text(top1) if top1 is not None else "",
            seconds_text(seconds) if seconds is not None else "",
            count_text(speed) if speed is not None else "",
            f"{run.world_size:,}" if run.world_size else "",
            run.algorithm,
            text(setting(run, "train.global_batch_size"), 60),
            text(setting(run, "train.epochs"), 20),
        ]
        rows.append([cell or _ABSENT for cell in row])
    return head, rows


def settings_of(run: Run) -> dict[str, str]:
    """The settings by their dotted names, as text; tables deeper than any recipe are cut."""
    found = flatten(run.config, max_depth=MAX_DEPTH, key=lambda name: text(name, 60))
    return {name: _show(value) for name, value in islice(found, MAX_SETTINGS)}


def differing_settings(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """(dotted name, value of each run) wherever not all runs agree; what a recipe merely says of itself is left out."""
    flat = [settings_of(run) for run in runs]
    names = sorted({name for one in flat for name in one if not name.startswith("reference.")})
    rows = [(name, [one.get(name, _ABSENT) for one in flat]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _show(value: Any) -> str:
    if isinstance(value, list):
        shown = "; ".join(_show(inner) for inner in value[:20])
        return text(f"[{shown}{'; ...' if len(value) > 20 else ''}]")
    if isinstance(value, dict):
        return text(", ".join(f"{text(key, 40)}={_leaf(inner)}" for key, inner in list(value.items())[:20]))
    return _leaf(value)


def _leaf(value: Any) -> str:
    return "..." if isinstance(value, dict | list) else text(value)
