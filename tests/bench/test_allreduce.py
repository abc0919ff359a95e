"""The bench: its arithmetic on made-up times, and rows of real ranks that are equal everywhere."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from megabatch.bench import allreduce as bench
from megabatch.bench.allreduce import (
    BenchRequest,
    Row,
    bench_allreduce,
    parse_size,
    print_rows,
    quantile,
    run_bench,
    write_calibration,
)
from megabatch.comm.allreduce import AllReducer
from megabatch.comm.calibration import read_calibration
from megabatch.comm.grid import ProcessGrid
from megabatch.errors import CommunicationError, ConfigError, LaunchError
from tests.ranks import run_ranks
from tests.system.runs import REPOSITORY, clean_environment


def test_quantiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(20, 0, -1)]
    assert [quantile(values, part) for part in (0.5, 0.95, 1.0)] == [10.0, 19.0, 20.0]
    assert quantile([3.0], 0.5) == quantile([3.0], 0.95) == 3.0


def test_bandwidths_are_those_of_nccl_tests() -> None:
    """1 MB over 4 ranks in 10 ms: 100 MB/s, and 2 * 3/4 of that on the bus."""
    torus, backend = bench._rows({"torus": [0.01, 0.03, 0.01], "backend": [0.02] * 3}, 1_000_000, 4)
    assert (torus.algorithm, torus.iterations, torus.p50_seconds, torus.p95_seconds) == ("torus", 3, 0.01, 0.03)
    assert torus.algorithm_bytes_per_second == pytest.approx(1e8)
    assert torus.bus_bytes_per_second == pytest.approx(1.5e8)
    assert torus.against_backend == 2.0
    assert backend.against_backend == 1.0
    (alone,) = bench._rows({"torus": [0.01]}, 1_000_000, 4)
    assert alone.against_backend is None


def test_rows_as_a_table_and_as_data() -> None:
    rows = [Row("torus", 2**20, 20, 0.0125, 0.02, 83.9e6, 125.8e6, 1.75), Row("ring", 4096, 3, 1.0, 2.0, 4096, 6144)]
    out = io.StringIO()
    print_rows(rows, Console(file=out, width=120), title="2x2")
    text = out.getvalue()
    for cell in ("1 MiB", "torus", "20", "12.500", "20.000", "83.9", "125.8", "1.75", "4 KiB", "2x2"):
        assert cell in text
    data = json.loads(json.dumps([asdict(row) for row in rows]))
    assert data[0]["p50_seconds"] == 0.0125
    assert data[1]["against_backend"] is None


def _bench(rank: int, folder: str) -> dict[str, Any]:
    grid = ProcessGrid.build("2x2", timeout_seconds=30)
    path = Path(folder) / "calibration.json"
    counted: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        run = AllReducer.run

        def counting(self: AllReducer, tensor: torch.Tensor, **options: Any) -> Any:
            if self.algorithm in ("torus", "backend"):
                counted.append(f"{self.algorithm} {tensor.numel()}")
            return run(self, tensor, **options)

        patch.setattr(AllReducer, "run", counting)
        rows = run_bench(grid, (4, 4001), ("torus", "backend"), iterations=3)
    told: dict[str, Any] = {"rows": rows, "counted": counted}
    told["calibration"] = write_calibration(grid, rows, path)
    told["read"] = read_calibration(path) == told["calibration"]
    try:
        write_calibration(grid, rows, path / "below a file")
    except ConfigError as error:
        told["unwritable"] = str(error)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            AllReducer, "run", lambda self, tensor, **_: tensor if self.algorithm == "ring" else run(self, tensor)
        )
        try:
            run_bench(grid, (4096,), ("ring",), iterations=1)
        except CommunicationError as error:
            told["wrong"] = str(error)
    for options in [((), ("torus",)), ((3,), ("torus",)), ((4,), ()), ((4,), ("tours",)), ((4,), ("torus",), 0)]:
        with pytest.raises(ConfigError):
            run_bench(grid, *options)  # type: ignore[arg-type]
    return told


def test_rows_of_real_ranks(tmp_path: Path) -> None:
    answers = run_ranks(4, _bench, str(tmp_path))
    told = answers[0]
    assert [answer["rows"] for answer in answers] == [told["rows"]] * 4
    assert [answer["calibration"] for answer in answers] == [told["calibration"]] * 4
    assert [(row.algorithm, row.message_bytes, row.iterations) for row in told["rows"]] == [
        *(("torus", 4, 3), ("backend", 4, 3), ("torus", 4000, 3), ("backend", 4000, 3))
    ]
    assert all(0 < row.p50_seconds <= row.p95_seconds for row in told["rows"])
    # Checked once each, then in turns: two rounds to warm up and three that count.
    for numel, log in ((1, told["counted"][:12]), (1000, told["counted"][12:])):
        rounds = [sorted(log[start : start + 2]) for start in range(0, 12, 2)]  # in an order drawn anew
        assert rounds == [[f"backend {numel}", f"torus {numel}"]] * 6
    points = {(point.algorithm, point.message_bytes): point.seconds for point in told["calibration"].points}
    assert points == {(row.algorithm, row.message_bytes): row.p50_seconds for row in told["rows"]}
    for answer in answers:
        assert answer["read"]
        assert answer["unwritable"].startswith(
            f"cannot write calibration to {tmp_path}"
        )  # the main rank's reason on every rank
        assert answer["wrong"].startswith("ring gave a wrong sum for 4 KiB (")


def _alone(rank: int) -> str:
    try:
        run_bench(ProcessGrid.build("1x1", timeout_seconds=10), (4,))
    except ConfigError as error:
        return str(error)
    return ""


def test_one_worker_has_nothing_to_bench() -> None:
    assert run_ranks(1, _alone)[0].startswith("one worker has nothing to reduce")


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
