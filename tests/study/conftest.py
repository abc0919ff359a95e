"""A stand-in for `megabatch train` that ends at once, and a study of tiny arms."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megabatch.study import run

# Reads the settings it is given, writes what a run folder must hold, and does what the arm's label smoothing says:
# 0.1 fails, 0.2 waits for a signal and stops politely, 0.3 ignores it, anything else finishes.
TRAINER = """
import json, os, pathlib, signal, sys, time, tomllib
settings, folder = pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[4])
table = tomllib.loads(settings.read_text())
folder.mkdir(parents=True, exist_ok=True)
(folder / "config.toml").write_text(settings.read_text())
with open(folder / "starts", "a") as starts:
    print(" ".join(sys.argv[5:]), os.environ["WORLD_SIZE"], os.getpgrp(), file=starts)
train, what = table["train"], table["train"]["label_smoothing"]
resumed = "--resume" in sys.argv
status = "finished"
if what == 0.1:
    print("some line")
    sys.exit("megabatch: no luck")
if what in (0.2, 0.3) and not resumed:
    signals = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, f: signals.append(n))
    (folder / "waiting").touch()
    while not signals or what == 0.3:
        time.sleep(0.01)
    status = "stopped"
top1 = 0.5 + 0.01 * train["seed"] + train["global_batch_size"] / 10000
(folder / "summary.json").write_text(json.dumps({
    "status": status, "top1": top1, "ensemble_top1": top1 + 0.1, "steps": 640 // train["global_batch_size"],
    "epoch": 2.0,
    "training_seconds": 1.0, "workers": 1, "skipped_steps": 0}))
"""


@pytest.fixture
def quick_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a study are played by the stand-in."""
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    monkeypatch.setattr(run, "COMMAND", (sys.executable, "-S", str(script)))
    monkeypatch.setattr(run, "POLL_SECONDS", 0.01)


@pytest.fixture
def study_file(tmp_path: Path) -> Path:
    path = tmp_path / "study.toml"
    path.write_text(
        """
title = "tiny"
recipe = "demo"
seeds = 2
margin_points = 1.5
set = ["train.ghost_batch_size=32", "train.global_batch_size=64", "train.label_smoothing=0"]

[[arm]]
name = "Small"
group = "ours"
seeds = 3

[[arm]]
name = "large 2x"
like = "Small"
group = "ours"
set = ["train.global_batch_size=128"]

[[arm]]
name = "large 2x, ensemble"
same_runs_as = "large 2x"
metric = "ensemble_top1"
against = "large 2x"
"""
    )
    return path
