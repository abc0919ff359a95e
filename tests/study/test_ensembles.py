"""Ensembles are evaluated once per finished run that an arm looks at, and found by their dotted metric."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megabatch.errors import TrainingError
from megabatch.study import run as running
from megabatch.study.ensembles import evaluate_ensembles, number_of_run
from megabatch.study.plan import Study, from_file
from megabatch.study.results import collect

EVALUATOR = """
import json, pathlib, sys
verb, folder, *options = sys.argv[1:]
assert (verb, options) == ("evaluate", ["--ensemble", "--json"])
top1 = json.loads((pathlib.Path(folder) / "summary.json").read_text())["top1"]
if top1 > 0.9:
    sys.exit("megabatch: no members")
with open(pathlib.Path(folder) / "evaluations", "a") as file:
    print("once", file=file)
print("a line of progress")
print(json.dumps({"ensemble": {"top1": top1 + 0.02}, "weight_average": {"top1": top1 - 0.01}, "members": []}))
"""


@pytest.fixture
def study(study_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    script = tmp_path / "evaluator.py"
    script.write_text(EVALUATOR)
    monkeypatch.setattr(running, "COMMAND", (sys.executable, "-S", str(script)))
    study_file.write_text(study_file.read_text().replace('"ensemble_top1"', '"ensemble.top1"'))
    return from_file(study_file)


def write_run(folder: Path, top1: float, status: str = "finished") -> None:
    folder.mkdir(parents=True)
    summary = {"status": status, "top1": top1, "steps": 1, "epoch": 1.0, "training_seconds": 1.0}
    (folder / "summary.json").write_text(json.dumps(summary | {"workers": 1, "skipped_steps": 0}))


def test_each_finished_run_is_evaluated_once(study: Study, tmp_path: Path) -> None:
    write_run(tmp_path / "small" / "seed-0", 0.5)
    write_run(tmp_path / "large-2x" / "seed-0", 0.5)
    write_run(tmp_path / "large-2x" / "seed-1", 0.6, status="stopped")
    for _ in range(2):
        evaluate_ensembles(study, tmp_path)
    assert (tmp_path / "large-2x" / "seed-0" / "evaluations").read_text() == "once\n"
    assert not (tmp_path / "small" / "seed-0" / "ensemble.json").exists()  # no arm asks for it
    assert not (tmp_path / "large-2x" / "seed-1" / "ensemble.json").exists()
    by_name = {result.arm.name: result.spread.mean for result in collect(study, tmp_path)}
    assert by_name["large 2x, ensemble"] == pytest.approx(52.0)
    assert by_name["large 2x"] == pytest.approx(50.0)
    assert number_of_run(tmp_path / "large-2x" / "seed-0", "weight_average.top1") == pytest.approx(0.49)


def test_what_a_run_does_not_have(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 0.5)
    assert number_of_run(tmp_path / "run", "ensemble.top1") is None
    assert number_of_run(tmp_path / "run", "speed") is None
    assert number_of_run(tmp_path / "run", "status") is None


def test_an_evaluation_that_fails_is_told(study: Study, tmp_path: Path) -> None:
    write_run(tmp_path / "large-2x" / "seed-0", 0.95)
    with pytest.raises(TrainingError, match=r"seed-0' could not be evaluated: megabatch: no members"):
        evaluate_ensembles(study, tmp_path)
