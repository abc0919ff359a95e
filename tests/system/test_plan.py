"""Measure this machine, plan, follow the plan, compare: the whole loop with real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.runs import REPOSITORY, SMALL, clean_environment


def megabatch(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "megabatch", *words],
        cwd=folder,
        env=clean_environment() | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_run_follows_its_plan_and_is_compared_with_it(tmp_path: Path) -> None:
    settings = [word for setting in SMALL for word in ("--set", setting)]
    megabatch(
        tmp_path,
        "bench",
        "step",
        "demo",
        "--workers",
        "2",
        "--iterations",
        "3",
        "--batches",
        "16",
        "--output",
        "step.json",
        *settings,
    )
    plan = ("plan", "demo", "--cluster", "this-machine", "--calibrate", "step.json", "--workers", "2")
    megabatch(tmp_path, *plan, "--algorithm", "ring", "--output", "plan.json", *settings)
    megabatch(tmp_path, "train", "demo", "--plan", "plan.json", "--output", "run", *settings)
    kept = json.loads((tmp_path / "run" / "plan.json").read_text(encoding="utf-8"))
    assert kept == json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert 'algorithm = "ring"' in (tmp_path / "run" / "config.toml").read_text(encoding="utf-8")
    parts = json.loads(megabatch(tmp_path, "plan", "--compare", "run", "--json"))["parts"]
    assert {"step", "compute", "communication and waiting", "training"} <= {part["part"] for part in parts}
    assert all(part["measured"] >= 0 for part in parts)
