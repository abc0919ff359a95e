"""The rows about `auto`, and one short race of real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.allreduce_table import AutoShare
from benchmarks.auto_choice import lines_of, main


def test_cells_that_reach_the_target_are_counted_and_so_are_those_that_miss_it_by_noise() -> None:
    runs = [
        {1024: AutoShare("ring", 0.98, 0.90), 2**20: AutoShare("ring or torus", 0.96, 1.10)},
        {1024: AutoShare("exchange", 1.01, None)},
    ]
    lines = lines_of(runs, 60)
    assert lines[3] == "| 1 | 1 MiB | 60 | ring or torus | 0.96 | 1.10 |"
    assert lines[4] == "| 2 | 1 KiB | 60 | exchange | 1.01 | - |"
    assert lines[-2] == "auto / best is at least 0.97 in 2 of 3 cells"
    assert lines[-1] == "the best against itself: 0.90 to 1.10, below 0.97 in 1 of 2 cells: so much is noise"


def test_one_iteration_is_refused() -> None:
    with pytest.raises(SystemExit, match="1 iterations cannot be halved"):
        main(["--iterations", "1"])


@pytest.mark.slow
def test_local_ranks_race_as_the_tool_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--runs", "1", "--iterations", "4", "--workers", "2", "--grid", "1x2", "--sizes", "1KB"]
    main([*words, "--json", str(tmp_path / "found.json")])
    [run] = json.loads((tmp_path / "found.json").read_text())["runs"]
    seconds = run["seconds"]["1024"]
    assert {"auto", "backend", "ring", "torus"} <= set(seconds)
    assert all(len(rounds) == 4 for rounds in seconds.values())
    assert run["shares"]["1024"]["reaches"] > 0
    assert "| 1 | 1 KiB | 4 |" in capsys.readouterr().out
