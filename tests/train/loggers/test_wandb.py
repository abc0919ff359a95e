"""Weights & Biases, offline: the rows are in its file, and a resumed run keeps its id."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megabatch.recipes import load_config
from megabatch.train.loggers import LogContext
from megabatch.train.loggers.wandb import WandbLogger


class FakeRun:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.summary: dict[str, Any] = {}
        self.finished = False

    def log(self, values: dict[str, Any], step: int) -> None:
        self.rows.append((step, values))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], FakeRun]]:
    """The arguments and the run of every `wandb.init`."""
    calls: list[tuple[dict[str, Any], FakeRun]] = []

    def init(**arguments: Any) -> FakeRun:
        calls.append((arguments, FakeRun()))
        return calls[-1][1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=lambda **given: given))
    return calls


def test_rows_summary_and_the_id_of_a_resumed_run(
    tmp_path: Path, started: list[tuple[dict[str, Any], FakeRun]]
) -> None:
    config = load_config("demo", ['log.to=["wandb"]', "log.project=mine"])
    logger = WandbLogger(LogContext(tmp_path, config))
    logger.row({"step": 1, "loss": 2.0, "applied": 1})
    logger.end({"top1": 0.5, "status": "finished", "members": []})
    logger.close()
    arguments, run = started[0]
    assert (arguments["project"], arguments["mode"], arguments["dir"]) == ("mine", "offline", str(tmp_path))
    assert run.rows == [(1, {"train/loss": 2.0})]
    assert run.summary == {"top1": 0.5, "status": "finished"}
    assert run.finished
    WandbLogger(LogContext(tmp_path, config, steps_done=1))
    assert started[1][0]["id"] == arguments["id"]
    assert (arguments["resume"], started[1][0]["resume"]) == (None, "allow")


@pytest.mark.slow
def test_the_real_library_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is an extra: pip install megabatch[wandb]")
    logger = WandbLogger(LogContext(tmp_path, load_config("demo", ['log.to=["wandb"]'])))
    for step in range(1, 5):
        logger.row({"step": step, "loss": 1.0 / step})
    logger.close()
    stored = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(stored) == 1
    assert b"train/loss" in stored[0].read_bytes()
