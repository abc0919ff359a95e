"""`megabatch bench allreduce`, and `doctor` in a world of several workers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megabatch.comm.calibration import read_calibration
from megabatch.errors import ConfigError, LaunchError
from megabatch.train.survey import BenchRequest, bench_allreduce, parse_size
from tests.system.runs import REPOSITORY, clean_environment


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("4096", 4096), ("100KB", 102_400), (" 1mb ", 2**20), ("0.5GB", 2**29), ("12B", 12)]
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


def test_bad_words_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="size '1XB' cannot be read"):
        bench_allreduce(BenchRequest(sizes="1XB", workers=2), {})
    with pytest.raises(ConfigError, match="did you mean 'torus'"):
        bench_allreduce(BenchRequest(algorithms="toruss", workers=2), {})
    with pytest.raises(LaunchError, match="add --workers N"):
        bench_allreduce(BenchRequest(), {})


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=REPOSITORY,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_local_workers_measure_and_write_a_calibration(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    words = ("--workers", "2", "--sizes", "4KB", "--algorithms", "torus,backend", "--iterations", "3", "--json")
    done = run("-m", "megabatch", "bench", "allreduce", *words, "--output", str(file))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [(row["algorithm"], row["message_bytes"], row["iterations"]) for row in result["rows"]] == [
        ("torus", 4096, 3),
        ("backend", 4096, 3),
    ]
    for row in result["rows"]:
        assert 0 < row["p50_seconds"] <= row["p95_seconds"]
    assert read_calibration(file).grid == result["grid"] == "1x2"


def test_a_grid_that_does_not_fit_is_one_line() -> None:
    done = run("-m", "megabatch", "bench", "allreduce", "--workers", "2", "--grid", "3x2")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "shapes that fit: 1x2, 2x1" in done.stderr


def test_doctor_under_torchrun_maps_the_world_once() -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run(*launcher, "-m", "megabatch", "doctor", "--json")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    findings = {finding["name"]: finding["text"] for finding in json.loads(line)}
    assert findings["grid"].startswith("1x2, 2 ranks")
    assert "rank 0 of 2" in findings["launcher"]
    assert "MB/s" in findings["row"]
