"""Run folders for the report's tests: made of plain files, no training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megabatch.comm.shape import parse_grid

CONFIG = """
[reference]
paper = "none"
hardware = "2 CPU cores"
time = "under 5 minutes"
accuracy = "at least 90 % top-1"
[data]
source = "fashion-mnist"
[model]
name = "resnet8"
[train]
global_batch_size = "0:256 2:512"
ghost_batch_size = 64
epochs = 4
seed = {seed}
[comm]
algorithm = "{algorithm}"
grad_dtype = "fp32"
[optimizer]
name = "sgd"
lr = [{{ until_epoch = 4.0, shape = "linear", start = 0.1, end = 0.0 }}]
"""


def row(step: int, steps_per_epoch: int = 25, **extra: Any) -> dict[str, Any]:
    epoch = step / steps_per_epoch
    values: dict[str, Any] = {
        "step": step,
        "epoch": epoch,
        "loss": 2.0 / (1 + epoch),
        "top1": min(0.95, 0.2 + 0.15 * epoch),
        "lr": 0.1 * (1 - epoch / 5),
        "momentum": 0.9,
        "gradient_norm": 1.0 + 1.0 / step,
        "global_batch_size": 256 if epoch < 2 else 512,
        "images_per_second": 3000.0 + 10 * (step % 7),
        "step_seconds": 0.1,
        "data_seconds": 0.005,
        "forward_seconds": 0.03,
        "backward_seconds": 0.04,
        "communication_seconds": 0.015,
        "compute_seconds": 0.08,
        "optimizer_seconds": 0.002,
    }
    if step % steps_per_epoch == 0:
        values |= {"val_top1": 0.5 + 0.1 * epoch, "val_top5": 0.9, "val_loss": 1.0}
    return values | extra


def make_run(
    folder: Path,
    num_steps: int = 100,
    workers: int = 4,
    grid: str = "2x2",
    algorithm: str = "torus",
    seed: int = 0,
    speed: float = 1.0,
    finished: bool = True,
    **row_extra: Any,
) -> Path:
    """A run folder as the engine leaves it."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG.format(seed=seed, algorithm=algorithm))
    shape = parse_grid(grid)
    environment = {
        "versions": {"megabatch": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
        "platform": "Linux",
        "cores": 2,
        "threads_per_worker": 1,
        "device": "cpu",
        "backend": "gloo",
        "hosts": ["node0"] * workers,
        "workers": workers,
        "grid": list(shape.sizes),
        "launcher": "torchrun",
        "commit": "a" * 40,
        "gradient_bytes": 4 * 2**20,
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    lines = []
    for step in range(1, num_steps + 1):
        values = row(step, **row_extra)
        values["images_per_second"] *= speed
        if step % 50 == 0:
            values["weights_digest"] = f"{step:064x}"  # text among numbers
        lines.append(json.dumps(values) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    ranks = [
        {"rank": rank, "host": "node0", "data_seconds": 0.005, "forward_seconds": 0.03 + 0.01 * (rank == 1)}
        | {"backward_seconds": 0.04, "communication_seconds": 0.015, "optimizer_seconds": 0.002}
        for rank in range(workers)
    ]
    (folder / "ranks.json").write_text(json.dumps({"num_steps": 97, "left_out_steps": 3, "ranks": ranks}))
    summary = {
        "status": "finished",
        "steps": num_steps,
        "epoch": 4.0,
        "workers": workers,
        "training_seconds": 145.0,
        "wall_seconds": 150.0,
        "images_per_second": 3000.0 * speed,
        "skipped_steps": 0,
        "top1": 0.9117,
        "top5": 0.9986,
        "val_images": 10000,
    }
    if finished:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def change(step: int, workers: int, lost: int = 0, joined: int = 0, seconds: float = 0.5) -> dict[str, Any]:
    """A row of membership.jsonl."""
    names: dict[str, list[Any]] = {
        "lost": [f"node0-{100 + i}-ab" for i in range(lost)],
        "joined": [f"node0-{200 + i}-cd" for i in range(joined)],
    }
    equipment = {"host": "node0", "processor": "EPYC", "torch": "2.13", "threads": "1"}
    names["joined_with"] = [{"name": name, **equipment} for name in names["joined"]]
    return {"time": 1.8e9, "step": step, "workers": workers, **names, "seconds": seconds, "grid": f"1x{workers}"}


def add_membership(folder: Path, *rows: dict[str, Any]) -> Path:
    (folder / "membership.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return folder


HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)">\u202e$x$'


def make_hostile_run(folder: Path) -> Path:
    """Everything a stranger could put into a run folder, in one."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(
        f"[model]\nname = {json.dumps(HOSTILE)}\n[reference]\n"
        f"accuracy = {json.dumps('</script>' + HOSTILE + ' 99 %')}\n"
        f"[train]\nglobal_batch_size = {json.dumps(HOSTILE)}\n{json.dumps(HOSTILE)} = 1\n"
    )
    environment = {
        "grid": [2, 2],
        "workers": 4,
        "hosts": [HOSTILE, None, 3, {"a": 1}],
        "versions": {HOSTILE: HOSTILE},
        "gradient_bytes": float("nan"),
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "summary.json").write_text('{"status": "finished", "top1": NaN, "training_seconds": 1e999, "wor')
    (folder / "ranks.json").write_text(
        json.dumps({"num_steps": -3, "ranks": [{"rank": 0, "host": HOSTILE, "data_seconds": 1.0}, 7, {"rank": "x"}]})
    )
    (folder / "plan.json").write_text("[" * 100_000)
    good = [json.dumps(row(step)) for step in range(1, 60)]
    bad = [
        '{"step": 5, "loss": NaN, "epoch": Infinity}',
        '{"step": 6, "loss": ' + "9" * 5000 + "}",
        '{"step": "7"}',
        "[1, 2]",
        "null",
        "\x00\x01",
        '{"step": 8, "loss": "<b>", "phase": ' + json.dumps(HOSTILE) + "}",
        "[" * 50_000,
        '{"step": 9, "pad": "' + "x" * 3_000_000 + '"}',
    ]
    torn = '{"step": 61, "lo'
    (folder / "metrics.jsonl").write_text("\n".join([*good, *bad]) + "\n" + torn)
    changes = [change(3, 3, lost=1) | {"lost": [HOSTILE, 7, {}], "grid": HOSTILE}, change(4, 4) | {"time": 1e300}]
    changes += [{"step": 5, "workers": -1}, {"step": 6, "workers": 2, "seconds": -1.0}, {"step": 7, "lost": "x" * 9}]
    add_membership(folder, *changes)
    return folder
