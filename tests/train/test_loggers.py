"""The interface: loggers by name, one curve per column; a logger that fails takes nothing with it."""

from __future__ import annotations

import json
import math
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megabatch.errors import ConfigError
from megabatch.recipes import load_config
from megabatch.train.loggers import TAGS, BoardLogger, LogContext, MlflowLogger, MllogLogger, WandbLogger, open_loggers


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


def test_columns_without_a_curve_are_left_out(tmp_path: Path) -> None:
    board = BoardLogger(context(tmp_path, "tensorboard"))
    board.row({"step": 1, "loss": 2.0, "applied": 1, "phase": "main"})
    board.end({"status": "finished"})
    board.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
    assert events.Tags()["scalars"] == ["train/loss"]


def events(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "mllog.log").read_text().splitlines()
    assert all(line.startswith(":::MLLOG ") for line in lines)
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]


def test_a_run_from_start_to_stop_and_its_resumption(tmp_path: Path) -> None:
    config = load_config("demo")
    logger = MllogLogger(LogContext(tmp_path, config))
    logger.row({"step": 1, "epoch": 0.5, "loss": 1.0})
    logger.row({"step": 2, "epoch": 1.0, "samples": 512, "val_top1": 0.75})
    logger.end({"status": "stopped", "samples": 512, "epoch": 1.0})
    logger.close()
    found = events(tmp_path)
    assert all({"namespace", "time_ms", "event_type", "key", "value", "metadata"} == set(one) for one in found)
    by_key = {one["key"]: one for one in found}
    assert by_key["eval_accuracy"]["value"] == 0.75
    assert by_key["eval_accuracy"]["metadata"]["epoch_num"] == 1.0
    assert by_key["global_batch_size"]["value"] == config.train.global_batch_size
    assert by_key["run_stop"]["metadata"]["status"] == "aborted"
    assert [one["key"] for one in found].count("eval_accuracy") == 1
    again = MllogLogger(LogContext(tmp_path, config, steps_done=2))
    again.end({"status": "finished"})
    again.close()
    starts = [one for one in events(tmp_path) if one["key"] == "run_start"]
    assert [one["metadata"]["resumed_after_step"] for one in starts] == [0, 2]


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
