"""Calibration sources, told apart by content."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megabatch.comm.calibration import AxisCost, Calibration, calibration_text
from megabatch.errors import ConfigError, DataError
from megabatch.plan.cluster import load_cluster
from megabatch.plan.evidence import gather, pick_rows
from megabatch.plan.step_times import step_times_text
from megabatch.recipes import load_config
from tests.plan.laboratory import laboratory
from tests.plan.test_calibrate import row
from tests.plan.test_step_times import TIMES
from tests.plan.test_validate import written


def test_this_machine_needs_its_measurements(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bench step"):
        gather(load_cluster("this-machine"), [])
    axes = (AxisCost("column", 2, 3e-4, 1.6e8), AxisCost("row", 2, 1e-3, 4e8))
    (tmp_path / "links.json").write_text(calibration_text(Calibration("2x2", 1, "gloo", axes)), encoding="utf-8")
    (tmp_path / "step.json").write_text(step_times_text(TIMES), encoding="utf-8")
    paths = [str(tmp_path / "links.json"), str(tmp_path / "step.json")]
    found = gather(load_cluster("this-machine"), paths)
    assert found.cluster.calibration is not None
    assert found.cluster.compute.model == "resnet8"
    assert found.cluster.straggler_deviation.value == 0.03
    assert found.layers == TIMES.layers


def test_rows_give_a_fit(tmp_path: Path) -> None:
    found = gather(load_cluster("dgx-a100"), [str(written(tmp_path, 20.8))], "nvidia:dgxa100")
    assert found.fit is not None
    assert len(found.fit.rows) == 3


def test_rows_must_be_of_one_family_and_one_stack() -> None:
    own, older = row(8, 408.0), row(8, 408.0, stack="1.1 mxnet closed")
    other = row(8, 400.0, family="else:a100-pcie")
    assert pick_rows([own], "A100-SXM4-80GB", "", "") == [own]
    assert pick_rows([own, older], "A100", own.family, own.stack) == [own]
    with pytest.raises(DataError, match="2 families of 'A100'"):
        pick_rows([own, other], "A100", "", "")
    with pytest.raises(DataError, match="must not be mixed"):
        pick_rows([own, older], "A100", own.family, "")
    with pytest.raises(DataError, match="no row is of accelerator 'V100'"):
        pick_rows([own], "V100", "", "")
    with pytest.raises(DataError, match="did you mean 'who:a100'"):
        pick_rows([own], "A100", "who:a10", "")


def test_a_finished_run_gives_its_compute_time(tmp_path: Path) -> None:
    config = load_config("demo")
    (tmp_path / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    (tmp_path / "summary.json").write_text(json.dumps({"workers": 4}), encoding="utf-8")
    rows = [{"batch_total": 512, "compute_seconds": 9.0 if update < 3 else 0.2} for update in range(9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    found = gather(laboratory(), [str(tmp_path)])
    # 8 ghosts of 64 on 4 workers: two passes each.
    assert found.cluster.compute.points == ((64.0, 0.1),)
    (tmp_path / "metrics.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(DataError, match="too few"):
        gather(laboratory(), [str(tmp_path)])


@pytest.mark.parametrize("text", ["{}", "[]", "no"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError):
        gather(laboratory(), [str(tmp_path / "x.json")])
    with pytest.raises(ConfigError, match="cannot be read"):
        gather(laboratory(), [str(tmp_path / "none.json")])
