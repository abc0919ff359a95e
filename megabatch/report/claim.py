"""What a run claims, under which conditions, and how to repeat it: plain rows for the page to show."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megabatch.report.run import Run, setting
from megabatch.report.units import count_text, percent_text, seconds_text
from megabatch.report.untrusted import items, number, table, text

__all__ = ["Tile", "conditions", "headline", "kept", "repeat_commands", "result_rows", "state", "tiles"]


@dataclass(frozen=True, slots=True)
class Tile:
    """One number of the claim, with its tag, and what the recipe promised."""

    label: str
    value: str
    detail: str
    tag: str = "measured"
    reference: str = ""
    is_kept: bool | None = None


def state(run: Run) -> tuple[str, str]:
    """How the run stands, in a word, and whether that is good, bad or neither ("")."""
    status = text(run.summary.get("status"), 30)
    if status == "finished":
        return "finished", "good"
    if status == "stopped":
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
    reference = {name: text(setting(run, f"reference.{name}")) for name in ("accuracy", "time", "hardware", "paper")}
    found = []
    top1, top5 = number(run.summary.get("top1")), number(run.summary.get("top5"))
    validated = run.metrics.points("val_top1")
    if top1 is None and validated:
        top1 = validated[-1].value
    epoch = number(run.summary.get("epoch"))
    if top1 is not None:
        detail = [f"top-5 {percent_text(top5)}"] if top5 is not None else []
        images = number(run.summary.get("val_images"))
        detail += [f"all {images:,.0f} validation images"] if images else []
        detail += [f"after {count_text(epoch)} epochs"] if epoch else []
        is_kept = kept(top1, reference["accuracy"]) if run.is_finished else None
        found.append(
            Tile(
                "Top-1 accuracy",
                percent_text(top1),
                ", ".join(detail),
                reference=reference["accuracy"],
                is_kept=is_kept,
            )
        )
    seconds, wall = number(run.summary.get("training_seconds")), number(run.summary.get("wall_seconds"))
    if seconds is not None:
        steps = number(run.summary.get("steps"))
        detail = [f"{steps:,.0f} steps"] if steps else []
        detail += [f"{seconds_text(wall)} with evaluation and checkpoints"] if wall else []
        hardware = f" on {reference['hardware']}" if reference["hardware"] else ""
        found.append(
            Tile(
                "Training time",
                seconds_text(seconds),
                ", ".join(detail),
                reference=reference["time"] and reference["time"] + hardware,
            )
        )
    column = run.metrics.columns.get("images_per_second")
    speed = column.quantile(0.5) if column else None
    if speed and column:
        workers = run.world_size
        detail = [f"median of {len(column.sample):,} steps"]
        detail += [f"{count_text(speed / workers)} per worker"] if workers else []
        found.append(Tile("Throughput", f"{count_text(speed)} images/s", ", ".join(detail)))
    return found


def kept(top1: float, reference: str) -> bool | None:
    """Whether an accuracy reaches the first percentage of a reference; None when it names none."""
    match = re.search(r"(\d{1,3}(?:\.\d{1,6})?) ?%", reference)
    return None if match is None else 100 * top1 >= float(match[1])


def conditions(run: Run) -> list[tuple[str, str]]:
    """What a reader needs to judge the numbers: machines, versions, grid, batch stages."""
    env, versions = run.environment, table(run.environment.get("versions"))
    hosts = Counter(text(host, 60) for host in items(env.get("hosts"), 100_000))
    shown = ", ".join(f"{host} ({count})" for host, count in sorted(hosts.items())[:6])
    more = f" and {len(hosts) - 6} more" if len(hosts) > 6 else ""
    gradient = number(env.get("gradient_bytes"))
    rows = [
        ("recipe", text(setting(run, "reference.paper"))),
        ("model", text(setting(run, "model.name"), 80)),
        ("images", text(setting(run, "data.source"), 80)),
        ("workers", f"{run.world_size:,} in a grid of {run.grid_text}" if run.world_size and run.grid_text else ""),
        ("hosts (workers)", shown + more),
        ("device", " ".join(filter(None, [text(env.get("device"), 80), _cores(env)]))),
        (
            "all-reduce",
            f"{run.algorithm}, {text(setting(run, 'comm.grad_dtype'), 20) or 'fp32'} on the wire" if run.config else "",
        ),
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
        lines.insert(
            0,
            f"git checkout {commit.removesuffix('-changed')}"
            + ("    # files differed from it" if "-" in commit else ""),
        )
    return lines


def result_rows(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """A comparison's table of results: headings and one row per run."""
    head = ["run", "state", "top-1", "training time", "images/s", "workers", "all-reduce", "total batch", "epochs"]
    rows = []
    for run in runs:
        top1, seconds = number(run.summary.get("top1")), number(run.summary.get("training_seconds"))
        speed = number(run.summary.get("images_per_second"))
        rows.append(
            [
                run.name,
                state(run)[0],
                percent_text(top1) if top1 is not None else "-",
                seconds_text(seconds) if seconds is not None else "-",
                count_text(speed) if speed is not None else "-",
                f"{run.world_size:,}" if run.world_size else "-",
                run.algorithm,
                text(setting(run, "train.global_batch_size"), 60) or "-",
                text(setting(run, "train.epochs"), 20) or "-",
            ]
        )
    return head, rows
