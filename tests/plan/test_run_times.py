"""Step times and layers out of run folders, whole and damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megabatch.errors import DataError, MegabatchError
from megabatch.plan.run_times import read_run_times
from megabatch.recipes import load_config

LAYERS = [{"name": "conv1", "parameters": 176, "work": 0.25}, {"name": "fc", "parameters": 650, "work": 0.75}]


def make_run(folder: Path, *, layers: Any = LAYERS, recipe: str = "demo", num_steps: int = 11) -> Path:
    """A run of 4 workers that computes 8 ghost batches of 64 in 0.2 s a step, slower at first; not finished."""
    folder.mkdir()
    config = load_config(recipe, ["train.ghost_batch_size=64"])
    (folder / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    environment = {"workers": 4, "device": "cpu"} | ({"layers": layers} if layers is not None else {})
    (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    rows = [
        {"step": index + 1, "global_batch_size": 512, "compute_seconds": seconds, "backward_seconds": 0.6 * seconds}
        for index, seconds in enumerate([9.0] * 5 + [0.2] * (num_steps - 5))
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return folder


def test_the_median_of_a_ghost_batch_size(tmp_path: Path) -> None:
    found = read_run_times(make_run(tmp_path / "a"))
    assert (found.model, found.ghost_batch_size, found.num_steps, found.workers) == ("resnet8", 64, 6, 4)
    assert found.seconds == pytest.approx(0.1)
    assert found.backward_share == pytest.approx(0.6)
    assert found.noise == 0.0
    assert found.layers is not None
    assert [layer.parameters for layer in found.layers] == [176, 650]


def test_runs_of_older_versions(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", layers=None)
    assert read_run_times(folder).layers is None
    (folder / "environment.json").unlink()
    with pytest.raises(DataError, match=r"summary.json' does not exist"):
        read_run_times(folder)
    (folder / "summary.json").write_text('{"workers": 2}', encoding="utf-8")
    found = read_run_times(folder)
    assert found.seconds == pytest.approx(0.05)
    assert found.device == ""


@pytest.mark.parametrize("layers", ["x", [1], [{"name": "a"}], [{"name": "a", "parameters": 0, "work": 1.0}], []])
def test_layers_that_cannot_be_are_none(tmp_path: Path, layers: Any) -> None:
    assert read_run_times(make_run(tmp_path / "a", layers=layers)).layers is None


def test_what_is_no_run_is_one_line(tmp_path: Path) -> None:
    def refused(folder: Path) -> str:
        with pytest.raises(MegabatchError) as caught:
            read_run_times(folder)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    (tmp_path / "docs").mkdir()
    assert "is no run folder, it has no config.toml" in refused(tmp_path / "docs")
    folder = make_run(tmp_path / "a")
    (folder / "metrics.jsonl").write_text('{"step": 1}\nx\n', encoding="utf-8")
    assert "is damaged in line 2" in refused(folder)
    (folder / "metrics.jsonl").write_text('{"step": 1, "compute_seconds": null}\n' * 99, encoding="utf-8")
    assert "0 timed steps" in refused(folder)
    (folder / "metrics.jsonl").unlink()
    assert "does not exist" in refused(folder)
    (folder / "environment.json").write_text('{"workers": "x"}', encoding="utf-8")
    assert "how many workers" in refused(folder)
    (folder / "environment.json").write_text("{", encoding="utf-8")
    assert "damaged" in refused(folder)
    (folder / "config.toml").write_bytes(b"\xff")
    assert "cannot be read" in refused(folder)
    assert "2 timed steps after its first 5; at least 3" in refused(make_run(tmp_path / "b", num_steps=7))
