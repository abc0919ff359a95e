"""A stand-in for `megabatch train` with a known best rate, and a tiny recipe."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megabatch.config import Config
from megabatch.recipes import load_config
from megabatch.study import run

TINY = (
    *("data.source=generated", "data.generated.num_train=200", "data.generated.num_val=20", "data.image_size=12"),
    *("model.width=4", "train.ghost_batch_size=10", "train.global_batch_size=20", "train.threads_per_worker=1"),
)

# top-1 falls with the distance of log2(lr_factor) from log2(1.7). A factor above 20 diverges as a real run does; a
# momentum of 0.5 fails for another reason.
TRAINER = """
import json, math, pathlib, sys, tomllib
settings, folder = pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[4])
table = tomllib.loads(settings.read_text())
folder.mkdir(parents=True, exist_ok=True)
(folder / "config.toml").write_text(settings.read_text())
optimizer, train, data = table["optimizer"], table["train"], table["data"]
with open(folder / "starts", "a") as starts:
    print(train["epochs"], data["held_out_images"], data["max_train_images"], train["seed"], file=starts)
samples = round(train["epochs"] * data["max_train_images"])
if optimizer["momentum"] == 0.5:
    sys.exit("megabatch: no luck")
if optimizer["lr_factor"] > 20:
    with open(folder / "metrics.jsonl", "w") as rows:
        for step in range(1, 13):
            row = {"step": step, "samples": 20 * step, "wall_seconds": 0.1 * step, "applied": step < 2}
            print(json.dumps(row), file=rows)
    sys.exit("megabatch: 11 steps in a row had gradients that are not finite")
top1 = 0.9 - 0.05 * abs(math.log2(optimizer["lr_factor"] / 1.7)) - 0.1 / train["epochs"]
(folder / "summary.json").write_text(json.dumps({
    "status": "finished", "top1": max(0.1, top1), "top5": 1.0, "val_loss": 1 - top1, "samples": samples,
    "wall_seconds": samples / 1000, "training_seconds": samples / 1000, "steps": 1, "epoch": train["epochs"],
    "workers": 1, "skipped_steps": 0}))
"""


@pytest.fixture
def toy_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of trials are played by the stand-in."""
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    monkeypatch.setattr(run, "COMMAND", (sys.executable, "-S", str(script)))
    monkeypatch.setattr(run, "POLL_SECONDS", 0.01)


@pytest.fixture
def tiny() -> Config:
    return load_config("demo", list(TINY))
