"""What is typed after `megabatch train`, and what it asks for; nothing is trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megabatch.cli.words import TrainWords, make_request
from megabatch.errors import CheckpointError, LaunchError
from megabatch.plan.request import PlanRequest
from megabatch.plan.request import run as make_plan
from megabatch.recipes import load_config
from megabatch.train.request import Elastic, TrainRequest
from megabatch.train.run_dir import hold

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def asked(words: TrainWords, environ: dict[str, str] | None = None) -> tuple[TrainRequest, int | None]:
    return make_request(words, environ or {}, lambda line: None)


def test_words_alone_are_the_recipe_and_its_changes(tmp_path: Path) -> None:
    assert asked(TrainWords("demo")) == (TrainRequest(load_config("demo"), name="demo"), None)
    words = TrainWords("demo", workers=4, grid="2x2", output=tmp_path, resume=True, overrides=("train.seed=1",))
    request = TrainRequest(load_config("demo", ["train.seed=1"]), tmp_path, "2x2", resume=True, name="demo")
    assert asked(replace(words, debug=True)) == (replace(request, debug=True), 4)


def test_the_bounds_of_an_elastic_run() -> None:
    elastic = asked(TrainWords("demo", elastic="local", min_workers=2, max_workers=3))[0].elastic
    assert elastic == Elastic(min_workers=2, max_workers=3)
    far = asked(TrainWords("demo", elastic="host:29510"))[0].elastic
    assert far == Elastic("host:29510", min_workers=1)
    with pytest.raises(LaunchError, match="add --elastic"):
        asked(TrainWords("demo", max_workers=3))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run on two local workers in a row."""
    folder = tmp_path / "run"
    with hold(folder, load_config("demo", ["train.seed=5"]), resume=False):
        environment = {"launcher": "megabatch", "workers": 2, "grid": [1, 2]}
        (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    return folder


def test_a_run_folder_goes_on_as_it_was(run: Path) -> None:
    request, num_local = asked(TrainWords(str(run), resume=True))
    assert (request.output, request.grid, num_local) == (run, "1x2", 2)
    assert request.config.train.seed == 5
    request, num_local = asked(TrainWords(str(run), resume=True, workers=3))
    assert (request.grid, num_local) == (None, 3)
    assert asked(TrainWords(str(run), resume=True), TORCHRUN)[1] is None  # the launcher's workers
    with pytest.raises(CheckpointError, match="is not a run folder"):
        asked(TrainWords(str(run.parent), resume=True))


def test_a_plan_gives_workers_and_settings_and_typed_words_win(tmp_path: Path) -> None:
    overrides = ("model.name=resnet50", "data.image_size=224", "train.seed=3")
    data = make_plan(PlanRequest("demo", "abci", workers="8", overrides=overrides)).as_data()
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(data), encoding="utf-8")
    request, num_local = asked(TrainWords("demo", plan=plan))
    assert (num_local, request.grid, request.plan) == (8, data["grid"], plan.read_text(encoding="utf-8"))
    assert request.config.comm.algorithm == data["settings"]["comm.algorithm"]
    assert (request.config.model.name, request.config.train.seed) == ("resnet50", 3)
    request, num_local = asked(TrainWords("demo", plan=plan, workers=4, overrides=("train.seed=4",)))
    assert (num_local, request.grid, request.config.train.seed) == (4, None, 4)


def test_a_scale_is_said_and_a_batch_of_ones_own_is_warned_of() -> None:
    request, _ = asked(TrainWords("mikami2018", scale="fashion-mnist", epochs=9.0))
    assert request.config == load_config("mikami2018", scale="fashion-mnist", epochs=9.0)
    assert any(line.startswith("scale") for line in request.lines)
    request, _ = asked(TrainWords("demo", overrides=("train.global_batch_size=256",)))
    assert [line.split()[0] for line in request.lines] == ["warning"]


def test_images_of_ones_own_are_looked_at_after_a_word_by_the_main_rank(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (24, 8, 8, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        folder = tmp_path / "images" / "abc"[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number}.png")
    images = tmp_path / "images"
    words = TrainWords("photos", data=images, overrides=(f"data.path={json.dumps(str(images))}",))
    said: list[str] = []
    request, _ = make_request(words, {}, said.append)
    assert said == [f"recipe         photos, looking at the images in {images}"]
    assert (request.config.data.num_classes, request.config.data.path) == (3, str(images))
    assert any(line.startswith("batch          ") for line in request.lines)
    assert {line.split()[0] for line in request.lines} >= {"pixels"}
    make_request(words, TORCHRUN, said.append)
    assert len(said) == 1  # rank 1 says nothing
