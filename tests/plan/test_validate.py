"""Validation: the rule is kept (no row helps to predict itself), and the public rows give what the docs say."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megabatch.errors import DataError
from megabatch.plan.validate import choose_evidence, validate_rows
from tests.plan.test_fit import row
from tests.plan.test_rows import HEAD

PUBLIC = Path(__file__).parents[3] / "shared" / "data" / "mlperf_resnet50_rows.csv"

LINES = (
    "2.0,NVIDIA,dgxa100_mxnet,closed,A100,x,1,8,8,3264,408.0,27006,120.86,1,0,35,5",
    "2.0,NVIDIA,dgxa100_n8_mxnet,closed,A100,x,8,8,64,3264,51.0,166871,19.56,1,0,35,5",
    "2.0,NVIDIA,dgxa100_n64_mxnet,closed,A100,x,64,8,512,26112,51.0,1255385,{},1,0,35,5",
    "2.0,Else,box,closed,Ascend910,x,16,8,128,4096,32.0,213546,19.18,1,0,35,5",
)


def written(folder: Path, step_ms: float) -> Path:
    path = folder / "rows.csv"
    text = "\n".join((HEAD, *LINES)).format(step_ms)
    path.write_text(text.replace("1255385", str(round(26112e3 / step_ms))) + "\n", encoding="utf-8")
    return path


def test_a_row_does_not_help_to_predict_itself(tmp_path: Path) -> None:
    first, second = (
        next(r for r in validate_rows(written(tmp_path, step)).results if r.workers == 512) for step in (20.8, 31.2)
    )
    assert first.predicted_ms == second.predicted_ms
    assert first.covered
    assert not second.covered
    assert second.error == pytest.approx(second.predicted_ms / 31.2 - 1)


def test_what_json_prints(tmp_path: Path) -> None:
    data = validate_rows(written(tmp_path, 20.8)).as_data()
    assert {"median_error", "max_error", "coverage", "rows", "refused", "rule"} <= set(data)
    assert 0 <= data["median_error"] <= data["max_error"] < 0.12
    assert data["coverage"] == 1.0
    assert "ascend910" in data["refused"][0]
    assert {row["rule"] for row in data["rows"]} == {"larger", "others", "pairs"}


def test_coverage_counts_every_larger_row_not_only_those_of_the_headline(tmp_path: Path) -> None:
    """One GPU row inside its interval, one of another accelerator far outside: half of them are held."""
    far = "2.0,Else,box,closed,Ascend910,x,32,8,256,8192,32.0,102400,80.0,1,0,35,5"
    path = written(tmp_path, 20.8)
    path.write_text(path.read_text(encoding="utf-8") + far + "\n", encoding="utf-8")
    data = validate_rows(path).as_data()
    assert data["headline"] == "larger, GPU, own stack"
    assert data["num_rows"] == 1
    assert data["coverage"] == 0.5


def test_a_hopeless_pair_does_not_end_the_validation(tmp_path: Path) -> None:
    lines = [f"{n},{b},{ms}" for n, b, ms in ((8, 1, 15), (64, 1, 16), (8, 64, 60), (16, 64, 61), (32, 32, 40))]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(("\ufeffN, local_b,step_ms", *lines)) + "\n", encoding="utf-8")
    assert len(validate_rows(path).results) >= 5


def test_a_table_without_large_gpu_systems_speaks_of_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("\n".join((HEAD, *LINES[:2])) + "\n", encoding="utf-8")
    data = validate_rows(path).as_data()
    assert data["headline"] == "others"
    assert data["num_rows"] == 2
    assert data["coverage"] is not None


def test_nothing_to_predict_is_told(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"{HEAD}\n{LINES[3]}\n", encoding="utf-8")
    with pytest.raises(DataError, match="no row that the others can predict"):
        validate_rows(path)


@pytest.mark.skipif(not PUBLIC.is_file(), reason="the public rows lie beside the clone, not in it")
def test_the_public_rows() -> None:
    data = validate_rows(PUBLIC).as_data()
    assert data["median_error"] <= 0.05
    assert data["max_error"] <= 0.12
    assert data["coverage"] >= 0.8
    assert data["groups"]["pairs"]["median_error"] <= 0.03
    assert data["groups"]["others"]["coverage"] >= 0.8


def test_evidence_goes_from_near_to_far() -> None:
    own, older = row(8, 408.0), row(8, 408.0, stack="1.1 mxnet closed", factor=1.1)
    framework, other = row(8, 408.0, stack="2.0 jax closed"), row(8, 400.0, family="else:a100-pcie", factor=1.2)
    rows = [own, older, framework, other]
    assert choose_evidence(own, rows) == ([own], "same system")
    assert choose_evidence(dataclasses.replace(own, chassis="tower"), rows) == ([own], "same stack")
    assert choose_evidence(own, [older, framework, other]) == ([older], "other stack")
    assert choose_evidence(own, [framework, other]) == ([framework], "other framework")
    assert choose_evidence(own, [other]) == ([other], "other system")
    with pytest.raises(DataError, match="no calibration row has the accelerator 'h100'"):
        choose_evidence(dataclasses.replace(own, family="who:h100", accelerator="h100"), rows)
