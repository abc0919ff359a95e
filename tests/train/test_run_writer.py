"""Rows go to the file and to all loggers; a resumed run hides what came after its checkpoint."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megabatch.recipes import load_config
from megabatch.report.metrics_log import read_metrics
from megabatch.schedule.clock import Clock
from megabatch.train.components import Components
from megabatch.train.loggers import MllogLogger
from megabatch.train.run_writer import RunWriter
from megabatch.train.state import RunState

ROW: dict[str, float | int] = {"loss": 2.5, "top1": 0.25, "lr": 0.1, "global_batch_size": 64, "applied": 1}


def writer(folder: Path, steps: int, say: Callable[[str], None] = print, *overrides: str) -> RunWriter:
    """That of a run which has made so many steps; it writes rows alone, so its components are but settings."""
    components = cast(Components, SimpleNamespace(config=load_config("demo", list(overrides))))
    return RunWriter(folder, components, RunState(Clock(100, 400, steps=steps)), say)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        board = EventAccumulator(str(folder / "tensorboard"))
        board.Reload()
    return {tag: [(one.step, one.value) for one in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def test_rows_go_to_both_and_a_resumed_run_hides_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    cursors = []
    with ExitStack() as stack:
        first = writer(tmp_path, 0)
        first.open(stack, 0)
        for step in (1, 2, 3, 4):
            first.append({"step": step, **ROW, "val_top1": step / 10})
            cursors.append((tmp_path / "metrics.jsonl").stat().st_size)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    found = scalars(tmp_path)
    assert set(found) == {"train/loss", "train/top1", "schedule/lr", "schedule/global_batch_size", "val/top1"}
    assert found["train/loss"] == [(1, 2.5), (2, 2.5), (3, 2.5), (4, 2.5)]

    # Killed after step 4; the newest checkpoint is that of step 2.
    # TensorBoard sorts files by the second in their names.
    began = int(time.time())
    while int(time.time()) == began:
        time.sleep(0.05)
    with ExitStack() as stack:
        second = writer(tmp_path, 2)
        second.open(stack, cursors[1])
        second.append({"step": 3, **ROW, "loss": 1.5})
    rows = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 2.5), (2, 2.5), (3, 1.5)]
    assert scalars(tmp_path)["train/loss"] == [(1, 2.5), (2, 2.5), (3, 1.5)]


def test_a_logger_that_fails_is_said_once_and_the_rows_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: MllogLogger, row: dict[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MllogLogger, "row", fail)
    said: list[str] = []
    with ExitStack() as stack:
        rows = writer(tmp_path, 0, said.append, 'log.to=["mllog", "tensorboard"]')
        rows.open(stack, 0)
        for step in (1, 2, 3):
            rows.append({"step": step, "loss": 1.0})
        rows.end({"status": "finished"})
    assert len(said) == 1
    assert "mllog stopped" in said[0]
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
