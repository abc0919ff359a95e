"""Rows of an earlier session count as runs, and what cannot be one is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megabatch.errors import ConfigError, DataError
from megabatch.study.conduct import StudyRequest, conduct
from megabatch.study.earlier import read_earlier
from megabatch.study.plan import from_file
from megabatch.study.results import collect

FILES = ("arms.csv", "runs.csv", "table.md", "study.json")


@pytest.mark.usefixtures("quick_trainer")
def test_a_study_in_two_sessions_writes_what_one_session_writes(study_file: Path, tmp_path: Path) -> None:
    whole = StudyRequest(str(study_file), num_jobs=2, output=tmp_path / "whole")
    assert conduct(whole) == 0
    first = StudyRequest(str(study_file), num_jobs=2, output=tmp_path / "first", only="Small")
    assert conduct(first) == 0
    rows = tmp_path / "runs.csv"
    shutil.copy(tmp_path / "first" / "runs.csv", rows)
    shutil.rmtree(tmp_path / "first")
    second = StudyRequest(str(study_file), num_jobs=2, output=tmp_path / "second", earlier=rows)
    assert conduct(second) == 0
    assert {path.parent.name for path in (tmp_path / "second").glob("*/seed-*")} == {"large-2x"}
    for name in FILES:
        assert (tmp_path / "second" / name).read_text() == (tmp_path / "whole" / name).read_text(), name
    third = replace(second, output=tmp_path / "third", earlier=tmp_path / "whole" / "runs.csv", collect_only=True)
    assert conduct(third) == 0
    assert (tmp_path / "third" / "arms.csv").read_text() == (tmp_path / "whole" / "arms.csv").read_text()


@pytest.mark.usefixtures("quick_trainer")
def test_only_the_seeds_that_are_missing_are_run(study_file: Path, tmp_path: Path) -> None:
    request = StudyRequest(str(study_file), num_jobs=2, output=tmp_path / "out", only="Small")
    assert conduct(request) == 0
    rows = (tmp_path / "out" / "runs.csv").read_text().splitlines()
    (tmp_path / "two.csv").write_text("\n".join([rows[0], rows[1], rows[3]]) + "\n")
    assert conduct(replace(request, output=tmp_path / "again", earlier=tmp_path / "two.csv")) == 0
    assert [path.name for path in (tmp_path / "again" / "small").iterdir()] == ["seed-1"]
    assert (tmp_path / "again" / "runs.csv").read_text().splitlines() == rows


@pytest.mark.usefixtures("quick_trainer")
def test_two_results_for_one_run_are_refused_unless_they_agree(study_file: Path, tmp_path: Path) -> None:
    request = StudyRequest(str(study_file), num_jobs=2, output=tmp_path / "out", only="Small")
    assert conduct(request) == 0
    study, output, rows = from_file(study_file), tmp_path / "out", tmp_path / "out" / "runs.csv"
    assert collect(study, output, read_earlier(rows, study)) == collect(study, output)
    rows.write_text(rows.read_text().replace("Small,1,51.", "Small,1,50."))
    with pytest.raises(DataError, match=r"arm 'Small', seed 1: .* has 51\.\d+ %, the earlier result is 50\.\d+ %"):
        collect(study, output, read_earlier(rows, study))


ROW = "Small,0,50.5,10,2.0,64,64,1.0,1,0,False"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda rows: rows.replace("arm,seed", "arm,sead"), "is no runs.csv of a study: its columns must be arm, seed"),
        (lambda rows: rows.replace("Small", "tiny"), "arm 'tiny' with seed 0, which the study does not have"),
        (lambda rows: rows.replace("Small,0", "Small,3"), "arm 'Small' with seed 3, which the study does not have"),
        (lambda rows: rows.replace("64,64", "64,128"), "at another batch than the study's 64"),
        (lambda rows: rows + ROW, "with seed 0 twice"),
        (lambda rows: rows.replace(",0,False", ""), "is not whole"),
        (lambda rows: rows.replace(",0,False", ",0,False,more"), "is not whole"),
        (lambda rows: rows.replace("50.5", "many"), "cannot be read as runs.csv of a study"),
        (lambda rows: rows.replace("50.5", "nan"), "has a number that cannot be"),
        (lambda rows: rows.replace("50.5", "1e6"), "has a number that cannot be"),
    ],
)
def test_what_is_no_run_of_the_study_is_refused(
    study_file: Path, tmp_path: Path, change: Callable[[str], str], complaint: str
) -> None:
    head = "arm,seed,percent,steps,epochs,global_batch_size_first,global_batch_size_last,training_seconds"
    rows = f"{head},workers,skipped_steps,diverged\n{ROW}\n"
    study, path = from_file(study_file), tmp_path / "runs.csv"
    path.write_text(rows)
    assert read_earlier(path, study)["Small", 0].percent == 50.5
    path.write_text(change(rows))
    with pytest.raises(ConfigError, match=complaint) as refused:
        read_earlier(path, study)
    assert "\n" not in str(refused.value)


def test_a_study_with_a_target_needs_its_folders(study_file: Path, tmp_path: Path) -> None:
    study = replace(from_file(study_file), target_percent=50.0)
    with pytest.raises(ConfigError, match="--earlier does not go with target_percent"):
        read_earlier(tmp_path / "runs.csv", study)


def test_the_rows_of_the_results_page_are_runs_of_its_study() -> None:
    root = Path(__file__).parents[2]
    for name, scale in (("fashion", ""), ("cifar", str(root / "studies/cifar_small.toml"))):
        study = from_file(root / "studies/tuned.toml", scale=scale)
        rows = root / f"docs/results/large_batch_tuned_{name}_runs.csv"
        assert len(read_earlier(rows, study)) >= 60
