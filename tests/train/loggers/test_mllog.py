"""MLPerf-style lines: each is `:::MLLOG` and one JSON event."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megabatch.recipes import load_config
from megabatch.train.loggers import LogContext
from megabatch.train.loggers.mllog import MllogLogger


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
