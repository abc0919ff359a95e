"""Files of `megabatch bench step`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megabatch.errors import ConfigError
from megabatch.plan.step_times import StepRow, StepTimes, read_step_times, step_times_text
from tests.plan.laboratory import two_layers

TIMES = StepTimes(
    "resnet8",
    "cpu",
    1,
    0.6,
    two_layers(),
    (StepRow(32, 0.05, 0.02, 9), StepRow(64, 0.09, 0.03, 9)),
    {"torch": "2.13.0"},
)


def test_goes_out_and_comes_back(tmp_path: Path) -> None:
    (tmp_path / "step.json").write_text(step_times_text(TIMES), encoding="utf-8")
    back = read_step_times(tmp_path / "step.json")
    assert back == TIMES
    assert back.table.seconds(48) == pytest.approx(0.07)
    assert back.table.relative_deviation == pytest.approx(math.hypot(0.03, 1.25 * 0.03 / 3))
    assert back.deviation == 0.03


@pytest.mark.parametrize(
    ("key", "value"),
    [("rows", []), ("backward_share", 1.5), ("layers", [{}]), ("megabatch_step_times", 7), ("model", None)],
)
def test_damaged_files_are_refused(tmp_path: Path, key: str, value: object) -> None:
    content = json.loads(step_times_text(TIMES))
    content[key] = value
    if value is None:
        del content[key]
    (tmp_path / "step.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ConfigError, match="measure again"):
        read_step_times(tmp_path / "step.json")
