"""What goes into a script is quoted or refused."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from megabatch.errors import ConfigError
from megabatch.launch.request import LaunchRequest, folder_of, plain, train_words, word


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
