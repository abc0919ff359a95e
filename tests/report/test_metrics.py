"""Curves from metrics of any length: extremes kept, memory bounded, damage counted."""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from megabatch.report.metrics import LEFT_OUT_STEPS, MAX_SAMPLE, NUM_BUCKETS, Column, Quantiles, read_metrics_file


def write(path: Path, num_rows: int, spikes: dict[int, float] | None = None) -> Path:
    spikes = spikes or {}
    with open(path, "w") as file:
        for step in range(1, num_rows + 1):
            loss = spikes.get(step, 1.0 + math.sin(step / 50) / 10)
            file.write(json.dumps({"step": step, "epoch": step / 100, "loss": loss}) + "\n")
    return path


def test_a_short_file_keeps_every_row(tmp_path: Path) -> None:
    metrics, problem = read_metrics_file(write(tmp_path / "m", 4 * NUM_BUCKETS))
    assert problem == ""
    assert not metrics.is_thinned
    assert [p.row + 1 for p in metrics.points("loss")] == list(range(1, 4 * NUM_BUCKETS + 1))
    assert metrics.points("nothing") == []


def test_a_long_file_keeps_first_last_and_every_spike(tmp_path: Path) -> None:
    spikes = {1: 7.0, 3456: 99.0, 9999: -5.0, 12_345: 0.25}
    metrics, _ = read_metrics_file(write(tmp_path / "m", 12_345, spikes))
    points = metrics.points("loss")
    assert metrics.is_thinned
    assert metrics.num_rows == 12_345
    assert len(points) <= 4 * NUM_BUCKETS
    assert points == sorted(points, key=lambda p: p.row)
    kept = {p.row + 1: p.value for p in points}
    assert {step: kept.get(step) for step in spikes} == spikes
    assert metrics.columns["loss"].num_values == 12_345


def test_quantiles_leave_out_the_first_steps_and_agree_with_sorting(tmp_path: Path) -> None:
    metrics, _ = read_metrics_file(write(tmp_path / "m", 1001, dict.fromkeys(range(1, LEFT_OUT_STEPS + 1), 1000000.0)))
    column = metrics.columns["loss"]
    values = sorted(p.value for p in column.points[LEFT_OUT_STEPS:])
    assert len(column.sample) == len(values) == 1001 - LEFT_OUT_STEPS
    middle, low, high = (values[math.ceil(part * len(values)) - 1] for part in (0.5, 0.05, 0.95))
    assert column.quantiles() == metrics.quantiles("loss") == Quantiles(middle, low, high, len(values))
    assert Column().quantiles() is None
    assert metrics.quantiles("none") is None


def test_the_sample_for_quantiles_is_bounded_and_stays_even() -> None:
    column = Column()
    for index in range(3 * MAX_SAMPLE):
        column.add(index, index, float(index), 0)
    assert len(column.sample) <= MAX_SAMPLE
    spread = column.quantiles()
    assert spread is not None
    assert abs(spread.middle / (1.5 * MAX_SAMPLE) - 1) < 0.01


def test_stages_are_marked_where_they_change(tmp_path: Path) -> None:
    lines = [{"step": n, "epoch": n / 10, "loss": 1.0, "phase": "warm-up" if n < 5 else "main"} for n in range(1, 9)]
    (tmp_path / "m").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_metrics_file(tmp_path / "m")[0].stages == ((0.1, "warm-up"), (0.5, "main"))


def test_damaged_lines_are_counted_and_the_others_kept(tmp_path: Path) -> None:
    lines = [
        '{"step": 1, "loss": 1.5}',
        '{"step": NaN}',
        "nonsense",
        "[]",
        '{"step": 2, "loss": Infinity}',
        '{"upd',
    ]
    (tmp_path / "m").write_text("\n".join(lines))
    metrics, problem = read_metrics_file(tmp_path / "m")
    assert metrics.num_rows == 2
    assert [p.value for p in metrics.points("loss")] == [1.5]
    assert problem == "3 lines of metrics.jsonl were damaged or too long"


def test_a_missing_file_and_a_pipe_are_a_word(tmp_path: Path) -> None:
    assert read_metrics_file(tmp_path / "none")[1] == "metrics.jsonl is not there"
    os.mkfifo(tmp_path / "pipe")
    assert "not an ordinary file" in read_metrics_file(tmp_path / "pipe")[1]


READ_LIMITED = """
import resource, sys
from pathlib import Path
from megabatch.report.metrics import read_metrics_file
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
metrics, problem = read_metrics_file(Path(sys.argv[1]))
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(metrics.num_rows, metrics.num_damaged, after - before)
"""


@pytest.mark.parametrize("megabytes", [200, pytest.param(2048, marks=pytest.mark.slow)])
def test_a_line_of_two_gigabytes_is_passed_over_in_little_memory(tmp_path: Path, megabytes: int) -> None:
    """The file is sparse: it takes no space on disk, and reads as so many zero bytes in one line."""
    path = tmp_path / "metrics.jsonl"
    with open(path, "wb") as file:
        file.write(b'{"step": 1, "loss": 1.0}\n')
        file.seek(megabytes * 2**20)
        file.write(b'\n{"step": 2, "loss": 2.0}\n')
    words = [sys.executable, "-c", READ_LIMITED, str(path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=True)
    num_rows, num_damaged, grown = map(int, done.stdout.split())
    assert (num_rows, num_damaged) == (2, 1)
    kilobytes = 1 if sys.platform == "darwin" else 1024
    assert grown * kilobytes < 64 * 2**20


@pytest.mark.skipif(not hasattr(resource, "RUSAGE_SELF"), reason="no resource usage here")
def test_memory_does_not_grow_with_rows(tmp_path: Path) -> None:
    grown = []
    for num_rows in (5_000, 50_000):
        path = write(tmp_path / f"m{num_rows}", num_rows)
        words = [sys.executable, "-c", READ_LIMITED, str(path)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=True)
        grown.append(int(done.stdout.split()[2]))
    assert grown[1] - grown[0] < 8 * 1024  # KiB; 50,000 parsed rows would take twice that
