"""The recorder: the same numbers in metrics.jsonl and in TensorBoard, also after a run was killed and resumed."""

from __future__ import annotations

import warnings
from pathlib import Path

from megabatch.report.run import read_metrics
from megabatch.train.recorder import Recorder

ROW: dict[str, float | int] = {"loss": 2.5, "top1": 0.25, "lr": 0.1, "global_batch_size": 64, "applied": 1}


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        board = EventAccumulator(str(folder / "tensorboard"))
        board.Reload()
    return {tag: [(one.step, one.value) for one in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def test_rows_go_to_both_and_a_resumed_run_hides_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    first = Recorder(tmp_path, keep_bytes=0, steps_done=0)
    cursors = []
    for step in (1, 2, 3, 4):
        first.append({"step": step, **ROW, "val_top1": step / 10})
        cursors.append(first.num_bytes)
    first.close()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert cursors[-1] == (tmp_path / "metrics.jsonl").stat().st_size
    found = scalars(tmp_path)
    assert set(found) == {"train/loss", "train/top1", "schedule/lr", "schedule/global_batch_size", "val/top1"}
    assert found["train/loss"] == [(1, 2.5), (2, 2.5), (3, 2.5), (4, 2.5)]

    # Killed after step 4; the newest checkpoint is that of step 2.
    second = Recorder(tmp_path, keep_bytes=cursors[1], steps_done=2)
    second.append({"step": 3, **ROW, "loss": 1.5})
    second.close()
    rows = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 2.5), (2, 2.5), (3, 1.5)]
    assert scalars(tmp_path)["train/loss"] == [(1, 2.5), (2, 2.5), (3, 1.5)]
