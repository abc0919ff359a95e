"""Plan files: they go out and come back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megabatch.errors import ConfigError
from megabatch.plan.planfile import follow, plan_as_data, read_plan
from megabatch.plan.planner import Goal, plan
from tests.plan.laboratory import laboratory, workload


def test_a_plan_comes_back_as_overrides(tmp_path: Path) -> None:
    load = workload("0:32768 30:65536")
    result = plan(laboratory(), load, [64, 256], Goal())
    data = plan_as_data(result, "laboratory", load, "0:32768 30:65536")
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    back = read_plan(path)
    assert (back.recipe, back.workers, back.grid) == ("test", 256, result.chosen.candidate.grid.text)
    assert 'train.batch_total="0:32768 30:65536"' in back.overrides
    assert f'comm.algorithm="{result.chosen.candidate.algorithm}"' in back.overrides
    assert back.prediction["step_seconds"]["middle"] == result.chosen.step.middle
    assert len(data["candidates"]) == len(result.candidates)
    assert data["candidates"][data["front"][0]]["workers"] == result.front[0].candidate.workers


@pytest.mark.parametrize("text", ["", "[]", '{"megabatch_plan": 99}', '{"megabatch_plan": 1}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="megabatch plan --output"):
        read_plan(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_plan(tmp_path / "none.json")


def test_following_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for workers in (16, 256):
        result = plan(laboratory(), workload(), [workers], Goal())
        path.write_text(json.dumps(plan_as_data(result, "laboratory", workload(), "32768")), encoding="utf-8")
        grid = result.chosen.candidate.grid.text
        assert follow(path, "test", None, None, {"RANK": "0"}).workers is None
        assert follow(path, "somewhere/test.toml", None, workers, {}).grid == grid
        assert follow(path, "test", "1x2", 2, {}).grid == "1x2"
        assert follow(path, "test", None, 2, {}).grid is None  # the plan's grid does not fit two workers
        if workers == 16:
            assert follow(path, "test", None, None, {}).workers == 16
        else:
            with pytest.raises(ConfigError, match="put srun, torchrun or mpirun"):
                follow(path, "test", None, None, {})
    with pytest.raises(ConfigError, match="is for recipe 'test'"):
        follow(path, "demo", None, None, {})
