"""TensorBoard is tested with the recorder (tests/train/test_recorder.py); here only what it leaves out."""

from __future__ import annotations

import warnings
from pathlib import Path

from megabatch.train.loggers import LogContext
from megabatch.train.loggers.board import BoardLogger


def test_columns_without_a_curve_are_left_out(tmp_path: Path) -> None:
    board = BoardLogger(LogContext(tmp_path))
    board.row({"step": 1, "loss": 2.0, "applied": 1, "phase": "main"})
    board.end({"status": "finished"})
    board.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
