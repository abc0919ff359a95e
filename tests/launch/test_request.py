"""What goes into a script is quoted or refused."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from megabatch.errors import ConfigError, MegabatchError, WriteError
from megabatch.launch.kubernetes import container_file, kubernetes_manifest
from megabatch.launch.request import LaunchRequest, check_recipe, folder_of, hand_over, plain, train_words, word
from megabatch.launch.script import slurm_script


def request(**given: Any) -> LaunchRequest:
    values: dict[str, Any] = {"recipe": "demo", "output": "/shared/runs/a", "nodes": 2, "workers_per_node": 4}
    return LaunchRequest(**(values | given))


def test_words_always_resume_and_carry_every_setting() -> None:
    words = train_words(request(data="/images", grid="2x4", overrides=("train.epochs=1", "model.name=x")))
    assert words == [
        *("train", "demo", "--output", "/shared/runs/a", "--resume", "--data", "/images", "--grid", "2x4"),
        *("--set", "train.epochs=1", "--set", "model.name=x"),
    ]
    assert request().world_size == 8
    assert folder_of(request()) == "/shared/runs"


@pytest.mark.parametrize("text", ["a b", "$(rm x)", "`id`", "it's", 'a"b', ";", "-x", "\u00e9"])
def test_a_word_stays_one_word(text: str) -> None:
    assert shlex.split(word(text)) == [text]


def test_what_cannot_be_carried_is_refused() -> None:
    for text in ("a\nb", "a\rb", "a\0b"):
        with pytest.raises(ConfigError, match="line break"):
            word(text)
    for text in ("a b", "x;y", "$HOME", "", "a\n#SBATCH --uid=0"):
        with pytest.raises(ConfigError):
            plain(text, "partition")
    assert plain("gpu_4,cpu-1", "partition") == "gpu_4,cpu-1"


@pytest.mark.parametrize("given", [{"gpus_per_node": 3}, {"name": "-x"}, {"name": "a b"}, {"name": ""}, {"output": ""}])
def test_requests_that_cannot_work(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        request(**given)


def test_recipes_overrides_and_grids_are_checked() -> None:
    check_recipe(LaunchRequest("demo", "runs/a", 2, 4, overrides=("train.epochs=1",), grid="2x4"))
    check_recipe(LaunchRequest("/only/on/the/cluster.toml", "runs/a", 2, 4, overrides=("what.ever=1",)))
    for wrong in (
        LaunchRequest("dmeo", "runs/a", 2, 4),
        LaunchRequest("demo", "runs/a", 2, 4, overrides=("train.epoch=1",)),
        LaunchRequest("demo", "runs/a", 2, 4, grid="2x3"),
    ):
        with pytest.raises(MegabatchError):
            check_recipe(wrong)


def test_a_script_is_printed_or_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hand_over("text\n", None)
    assert capsys.readouterr().out == "text\n"
    hand_over("text\n", tmp_path / "a.sh")
    assert (tmp_path / "a.sh").read_text() == "text\n"
    assert "written" in capsys.readouterr().out
    with pytest.raises(WriteError, match=r"there is no folder .*; make it"):
        hand_over("text\n", tmp_path / "none" / "a.sh")


EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_examples_are_what_the_command_writes() -> None:
    of_slurm = LaunchRequest("demo", "runs/demo", 4, 8, gpus_per_node=8, time_limit="01:00:00")
    assert (EXAMPLES / "slurm" / "demo.sbatch").read_text() == slurm_script(of_slurm)
    of_kubernetes = LaunchRequest("demo", "/runs/demo", 4, 8, gpus_per_node=8, health_check=False)
    manifest = kubernetes_manifest(of_kubernetes, "registry.example/megabatch:1", "runs")
    assert (EXAMPLES / "kubernetes" / "demo.json").read_text() == manifest
    assert (EXAMPLES / "kubernetes" / "Containerfile").read_text() == container_file(cuda=True)
