"""Mistakes are told before a script exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from megabatch.errors import ConfigError, MegabatchError
from megabatch.launch.kubernetes import container_file, kubernetes_manifest
from megabatch.launch.request import LaunchRequest
from megabatch.launch.slurm import slurm_script
from megabatch.launch.write import check_kind, check_recipe, hand_over


def test_recipes_overrides_and_grids_are_checked() -> None:
    check_recipe("demo", ["train.epochs=1"], "2x4", 8)
    check_recipe("/only/on/the/cluster.toml", ["what.ever=1"], "", 8)
    for arguments in (("dmeo", [], "", 8), ("demo", ["train.epoch=1"], "", 8), ("demo", [], "2x3", 8)):
        with pytest.raises(MegabatchError):
            check_recipe(*arguments)


def test_kinds() -> None:
    assert (check_kind("pytorchjob"), check_kind("trainjob")) == ("pytorchjob", "trainjob")
    with pytest.raises(ConfigError, match="did you mean"):
        check_kind("trainjobs")


def test_a_script_is_printed_or_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hand_over("text\n", None)
    assert capsys.readouterr().out == "text\n"
    hand_over("text\n", tmp_path / "a.sh")
    assert (tmp_path / "a.sh").read_text() == "text\n"
    assert "written" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="make it first"):
        hand_over("text\n", tmp_path / "none" / "a.sh")


EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_examples_are_what_the_command_writes() -> None:
    of_slurm = LaunchRequest("demo", "runs/demo", 4, 8, gpus_per_node=8, time_limit="01:00:00")
    assert (EXAMPLES / "slurm" / "demo.sbatch").read_text() == slurm_script(of_slurm)
    of_kubernetes = LaunchRequest("demo", "/runs/demo", 4, 8, gpus_per_node=8, health_check=False)
    manifest = kubernetes_manifest(of_kubernetes, "registry.example/megabatch:1", "runs")
    assert (EXAMPLES / "kubernetes" / "demo.json").read_text() == manifest
    assert (EXAMPLES / "kubernetes" / "Containerfile").read_text() == container_file(cuda=True)
