"""MLflow to a local file store: curves, settings, status, and one run also after resuming."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megabatch.recipes import load_config
from megabatch.train.loggers import LogContext
from megabatch.train.loggers.mlflow import MlflowLogger


class FakeClient:
    uri = ""
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []  # noqa: RUF012 - shared on purpose, emptied per test

    def __init__(self, uri: str) -> None:
        FakeClient.uri = uri

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return "7"

    def create_run(self, experiment: str, run_name: str) -> SimpleNamespace:
        self.calls.append(("create_run", (experiment, run_name), {}))
        return SimpleNamespace(info=SimpleNamespace(run_id="abc"))

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: self.calls.append((name, given, named))


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    FakeClient.calls = []
    entities = SimpleNamespace(Metric=lambda *values: values, Param=lambda *values: values)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setitem(sys.modules, "mlflow.tracking", SimpleNamespace(MlflowClient=FakeClient))
    return FakeClient


def test_rows_settings_and_the_end(tmp_path: Path, client: type[FakeClient]) -> None:
    config = load_config("demo", ['log.to=["mlflow"]'])
    logger = MlflowLogger(LogContext(tmp_path, config))
    logger.row({"step": 3, "wall_seconds": 1.5, "loss": 2.0, "gradient_norm": math.nan, "phase": "main"})
    logger.end({"status": "finished", "top1": 0.5})
    logger.close()
    assert client.uri == (tmp_path / "mlruns").as_uri()
    names = [name for name, _, _ in client.calls]
    assert names == ["create_run", "log_batch", "log_batch", "log_metric", "set_terminated"]
    assert ("train.ghost_batch_size", "64") in client.calls[1][2]["params"]
    assert client.calls[2][2]["metrics"] == [("train/loss", 2.0, 1500, 3)]
    assert client.calls[4][1] == ("abc", "FINISHED")
    MlflowLogger(LogContext(tmp_path, config, steps_done=3)).row({"step": 4, "loss": 1.0})
    assert [name for name, _, _ in client.calls].count("create_run") == 1


@pytest.mark.slow
def test_the_real_library_with_a_file_store(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="mlflow is an extra: pip install megabatch[mlflow]")
    from mlflow.tracking import MlflowClient

    logger = MlflowLogger(LogContext(tmp_path, load_config("demo", ['log.to=["mlflow"]'])))
    for step in range(1, 4):
        logger.row({"step": step, "loss": 1.0 / step})
    logger.end({"status": "finished", "top1": 0.5})
    client = MlflowClient((tmp_path / "mlruns").as_uri())
    run_id = (tmp_path / "mlflow-id").read_text()
    assert [(m.step, m.value) for m in client.get_metric_history(run_id, "train/loss")] == [
        (1, 1.0),
        (2, 0.5),
        (3, 1 / 3),
    ]
    assert client.get_run(run_id).info.status == "FINISHED"
