"""The interface: loggers by name, one curve per column, and a logger that fails takes nothing with it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from megabatch.errors import ConfigError
from megabatch.recipes import load_config
from megabatch.report.run import read_metrics
from megabatch.train.loggers import TAGS, LogContext, open_loggers
from megabatch.train.loggers.mllog import MllogLogger
from megabatch.train.metrics import Recorder


def context(folder: Path, *names: str) -> LogContext:
    return LogContext(folder, load_config("demo", [f"log.to={list(names)}".replace("'", '"')]))


def test_every_known_number_has_its_own_curve() -> None:
    assert len(set(TAGS.values())) == len(TAGS)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_extra_is_named_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in (name, f"{name}.entities"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"megabatch\[{name}\]"):
        open_loggers(context(tmp_path, name), print)


@pytest.mark.parametrize("names", ['["tensorbord"]', '["mllog", "mllog"]'])
def test_unknown_and_doubled_names_are_refused(names: str) -> None:
    with pytest.raises(ConfigError):
        load_config("demo", [f"log.to={names}"])


def test_a_logger_that_fails_is_said_once_and_the_rows_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: MllogLogger, row: dict[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MllogLogger, "row", fail)
    said: list[str] = []
    recorder = Recorder(tmp_path, 0, 0, context(tmp_path, "mllog", "tensorboard").config, said.append)
    for step in (1, 2, 3):
        recorder.append({"step": step, "loss": 1.0})
    recorder.end({"status": "finished"})
    recorder.close()
    assert len(said) == 1
    assert "mllog stopped" in said[0]
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
