"""Rows from logs: made-up rounds with known times, damaged lines, logs handed in twice."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from benchmarks.mlperf_rows import IMAGES, old_rows_of, read_run, rows_of

ALWAYS = datetime.date(1970, 1, 1)


def log(global_batch_size: int, step_seconds: float, began_ms: int = 1_700_000_000_000, blocks: int = 4) -> str:
    """A run of blocks of four epochs, the first twice as slow, with five seconds of evaluation after each."""
    now = float(began_ms)
    lines = ["some other output"]

    def say(key: str, value: object = None, **metadata: object) -> None:
        event = {"namespace": "", "time_ms": round(now), "key": key, "value": value, "metadata": metadata}
        lines.append(f"0: :::MLLOG {json.dumps(event)}")

    say("global_batch_size", global_batch_size)
    say("run_start")
    for block in range(blocks):
        say("block_start", first_epoch_num=4 * block + 1, epoch_count=4)
        now += 1e3 * step_seconds * 4 * IMAGES / global_batch_size * (2 if block == 0 else 1)
        say("eval_start")
        now += 5000
        say("eval_stop")
        say("block_stop")
    say("run_stop")
    return "\n".join([*lines, ":::MLLOG {cut off"])


def checkout(folder: Path, name: str, text: str, nodes: str = "2") -> Path:
    runs = folder / name / "Maker" / "results" / "box_n2_mxnet" / "resnet"
    runs.mkdir(parents=True)
    for number in range(3):
        (runs / f"result_{number}.txt").write_text(text, encoding="utf-8")
    systems = folder / name / "Maker" / "systems"
    systems.mkdir()
    system = {
        "number_of_nodes": nodes,
        "accelerators_per_node": "8 (two boards)",
        "accelerator_model_name": "A100-SXM",
        "division": "closed",
    }
    (systems / "box_n2_mxnet.json").write_text(json.dumps(system), encoding="utf-8")
    return folder / name


def test_a_step_is_of_steady_blocks_without_evaluation() -> None:
    run = read_run(log(3264, 0.125))
    assert run is not None
    assert run.step_seconds == pytest.approx(0.125, rel=1e-4)
    assert run.global_batch_size == 3264
    assert run.epochs == 16
    assert run.train_seconds == pytest.approx(5 * 0.125 * 4 * IMAGES / 3264 + 20, rel=1e-4)


def test_logs_that_say_too_little_are_passed_over() -> None:
    assert read_run(log(3264, 0.125, blocks=1)) is None
    assert read_run("") is None
    assert read_run(log(3264, 0.125).replace("run_stop", "stopped")) is None
    assert read_run(log(3264, 0.125).replace("global_batch_size", "batch")) is None
    stop = '"key": "run_stop", "value": null, "metadata": {'
    assert read_run(log(3264, 0.125).replace(stop, f'{stop}"status": "aborted"')) is None


def test_the_first_block_warms_up_and_does_not_count() -> None:
    run = read_run(log(3264, 0.125, blocks=2))
    assert run is not None
    assert run.step_seconds == pytest.approx(0.125, rel=1e-4)


def test_a_row_has_the_columns_the_planner_reads(tmp_path: Path) -> None:
    (row,) = rows_of(checkout(tmp_path, "training_results_v3.0", log(3264, 0.125)), ALWAYS, set())
    wanted = {"round": "3.0", "org": "Maker", "nodes": 2, "acc_per_node": 8, "N": 16, "gbs": 3264, "local_b": "204"}
    assert {key: row[key] for key in wanted} == wanted
    assert float(row["step_ms"]) == pytest.approx(125, abs=0.05)
    assert float(row["img_s"]) == pytest.approx(3264 / 0.125, rel=1e-3)


def test_the_same_logs_in_a_later_round_are_no_new_measurement(tmp_path: Path) -> None:
    seen: set[tuple[object, ...]] = set()
    first = checkout(tmp_path, "training_results_v2.1", log(3264, 0.125))
    again = checkout(tmp_path, "training_results_v3.0", log(3264, 0.125))
    assert [row["round"] for folder in (first, again) for row in rows_of(folder, ALWAYS, seen)] == ["2.1"]
    assert list(rows_of(first, datetime.date(2030, 1, 1), set())) == []


def test_the_oldest_round_has_logs_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "v0.5.0/nvidia/submission/results/dgx1_multi_mxnet/resnet"
    folder.mkdir(parents=True)
    entry = {"nodes": [{"num_accelerators": 8, "accelerator": "V100"}]}
    (folder.parent / "entry.json").write_text(json.dumps(entry), encoding="utf-8")
    now, lines = 1000.0, []
    epoch = 0.05 * IMAGES / (26 * 8 * 3)
    for key, seconds in (
        *((("run_clear_caches", 0.0),) * 3),
        *(("run_start", 1.0), ("input_batch_size: 26", 0.0), ("train_epoch: 0", 2 * epoch), ("train_epoch: 1", epoch)),
        *(("train_epoch: 2", epoch), ("eval_start", 9.0), ("eval_stop", 0.0), ("train_epoch: 3", epoch)),
        ("run_stop", 0.0),
    ):
        lines.append(f":::MLPv0.5.0 resnet {now:.6f} (fit.py:1) {key}")
        now += seconds
    (folder / "result_0.txt").write_text("\n".join(lines), encoding="utf-8")
    (row,) = old_rows_of(tmp_path, ALWAYS)
    assert (row["round"], row["org"], row["nodes"], row["N"], row["gbs"]) == ("0.5", "NVIDIA", 3, 24, 624)
    assert float(row["step_ms"]) == pytest.approx(50, abs=0.05)
