"""Steps to a target by batch: first arrivals, runs that never arrive, the fitted law, and the planner that reads it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megabatch.errors import ConfigError
from megabatch.plan.convergence import ConvergenceLaw, median_with_censored, read_study
from megabatch.plan.request import PlanRequest
from megabatch.plan.request import run as make_plan
from megabatch.study.conduct import StudyRequest, conduct
from megabatch.study.plan import from_file
from megabatch.study.targets import Arrival, laws_of, points_of, target_lines

NUM_IMAGES, FLOOR, CRITICAL = 5000, 3.0, 400.0
STORED = Path(__file__).parents[2] / "docs" / "results" / "steps_to_target.csv"
STUDY = """
title = "steps to 80 %"
recipe = "demo"
seeds = 3
target_percent = 80.0
set = ["train.ghost_batch_size=50", "train.evaluate_every_epochs=1"]
"""


def study_of(folder: Path, batches: tuple[int, ...], text: str = STUDY) -> Path:
    path = folder / "study.toml"
    arms = [f'[[arm]]\nname = "{b}"\ngroup = "SGD"\nset = ["train.global_batch_size={b}"]\n' for b in batches]
    path.write_text(text + "\n".join(arms), encoding="utf-8")
    return path


def store_run(study: Path, output: Path, batch: int, seed: int, arrives_epochs: float | None) -> None:
    """A finished run with an evaluation before the target, one with it, and a better one later."""
    [run] = [run for run in from_file(study).runs() if run.arm == str(batch) and run.seed == seed]
    folder = output / run.key
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(run.config.to_toml(), encoding="utf-8")
    summary = {"status": "finished", "top1": 0.81 if arrives_epochs else 0.7, "steps": 12 * NUM_IMAGES // batch}
    summary |= {"epoch": 12.0, "training_seconds": 9.0, "workers": 1, "skipped_steps": 0}
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    rows = [{"step": 1, "samples": batch, "epoch": batch / NUM_IMAGES, "wall_seconds": 0.1, "val_top1": 0.5}]
    if arrives_epochs:
        steps = arrives_epochs * NUM_IMAGES / batch
        at = {"step": steps, "samples": steps * batch, "epoch": arrives_epochs, "wall_seconds": 0.2 * steps}
        rows += [at | {"val_top1": 0.8}, at | {"step": steps + 5, "val_top1": 0.9}, at | {"step": steps + 9}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Runs that follow a law, with a seed that never arrives at 400 and two of three that never do at 3,200."""
    batches = (100, 200, 400, 1600, 3200)
    study, output = study_of(tmp_path, batches), tmp_path / "out"
    for batch in batches:
        for seed, factor in enumerate((0.98, 1.0, 1.02)):
            lost = (batch == 400 and seed == 0) or (batch == 3200 and seed > 0)
            epochs = FLOOR * (1 + batch / CRITICAL) * (factor if batch != 400 else 1.0)
            store_run(study, output, batch, seed, None if lost else epochs)
    assert conduct(StudyRequest(str(study), output=output, collect_only=True)) == 0
    return output


def test_the_table_and_the_critical_batch_come_out(stored: Path) -> None:
    text = (stored / "table.md").read_text(encoding="utf-8")
    assert "| 100 | 100 | 3 of 3 | 188 | 18,750 | 37.5 |" in text
    assert "| 400 | 400 | 2 of 3 | 75 | 30,000 | 15.0 |" in text
    assert "| 3200 | 3,200 | 1 of 3 | not reached | not reached | not reached |" in text
    assert "SGD: critical batch 400 images" in text
    assert "batches of 100 to 1,600" in text
    svg = (stored / "targets.svg").read_text(encoding="utf-8")
    assert "perfect scaling from its smallest batch" in svg
    assert "law, critical batch 400" in svg


def test_the_planner_reads_the_users_own_curve(stored: Path) -> None:
    """By the folder and by the table; a larger batch than that of any median is warned of."""
    law = read_study(stored / "targets.csv", 0.8)
    assert law.floor_epochs == pytest.approx(FLOOR, rel=1e-3)
    assert law.critical_batch == pytest.approx(CRITICAL, rel=1e-3)
    assert law.batches == (100, 1600)
    for source, batch in ((stored, 800), (stored / "targets.csv", 800), (stored, 3200)):
        request = PlanRequest("goyal2017", "abci", workers="4", batches=(str(batch),), calibrate=(str(source),))
        chosen = make_plan(request).result.chosen
        assert chosen.epochs.middle == pytest.approx(FLOOR * (1 + batch / CRITICAL), rel=1e-2)
        assert any("beyond the largest" in text for text in chosen.warnings) == (batch == 3200)


def test_the_stored_runs_of_the_example_give_the_law_that_the_documents_name() -> None:
    """Fashion-MNIST: medians of 7, 6, 7.04 and 11.04 epochs; all three runs at 1,600 are censored."""
    law = read_study(STORED, 0.74)
    assert law.batches == (100, 800)
    assert law.critical_batch == pytest.approx(963, rel=1e-2)
    for batch, epochs in ((100, 7.0), (200, 6.0), (400, 7.04), (800, 11.04)):
        assert law.at(batch).epochs == pytest.approx(epochs, rel=0.2)


def arrival(batch: int, seed: int, epochs: float | None, group: str = "SGD") -> Arrival:
    steps = None if epochs is None else round(epochs * NUM_IMAGES / batch)
    return Arrival(str(batch), group, seed, batch, 80.0, 999, steps, steps and steps * batch, epochs, epochs)


def test_a_run_that_does_not_arrive_counts_as_later_than_all_others() -> None:
    assert median_with_censored([3.0, None, 1.0]) == 3.0
    assert median_with_censored([3.0, 1.0]) == 2.0
    assert median_with_censored([3.0, None]) == math.inf
    assert median_with_censored([None, None, 1.0]) == math.inf
    [point] = points_of([arrival(100, 0, 4.0), arrival(100, 1, None), arrival(100, 2, 5.0)])
    assert (point.epochs, point.num_arrived, point.num_runs) == (5.0, 2, 3)


def test_a_group_without_a_law_says_why_and_a_flat_one_scales_perfectly() -> None:
    few = points_of([arrival(100, 0, 4.0), arrival(200, 0, 5.0), arrival(400, 0, None)])
    laws = laws_of(few)
    assert isinstance(laws["SGD"], str)
    assert "2 points" in laws["SGD"]
    flat = points_of([arrival(batch, 0, 4.0) for batch in (100, 200, 400)])
    law = laws_of(flat)["SGD"]
    assert isinstance(law, ConvergenceLaw)
    assert "the critical batch is far larger" in target_lines(flat, {"SGD": law}, 80.0)[-1]


def test_a_target_needs_evaluations_on_the_way(tmp_path: Path) -> None:
    path = study_of(tmp_path, (100,), STUDY.replace("evaluate_every_epochs=1", "evaluate_every_epochs=0"))
    with pytest.raises(ConfigError, match="evaluated at its end only"):
        from_file(path)


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [("group", ("SGD", "LARS"), "2 methods"), ("target_percent", ("80", "90"), "2 targets")],
)
def test_a_table_of_several_laws_is_refused(tmp_path: Path, column: str, values: tuple[str, str], said: str) -> None:
    rows = [f"global_batch_size,epochs_to_target,{column}"]
    rows += [f"{batch},{batch / 100},{value}" for batch in (100, 200, 400) for value in values]
    (tmp_path / "targets.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    with pytest.raises(Exception, match=said):
        read_study(tmp_path / "targets.csv", None)


def test_another_target_than_the_studys_is_refused(stored: Path) -> None:
    with pytest.raises(Exception, match="counts the epochs to 80 %, not to the target of 85 %"):
        read_study(stored / "targets.csv", 0.85)


def test_two_studies_are_refused(stored: Path) -> None:
    request = PlanRequest("demo", "this-machine", study=stored / "targets.csv", calibrate=(str(stored),))
    with pytest.raises(ConfigError, match="2 studies were given"):
        make_plan(request)
