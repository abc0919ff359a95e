"""The accuracy of a run on images that are not its own: classes are found by name."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest

from megabatch.data.folder import FolderImages
from megabatch.errors import CheckpointError, DataError
from megabatch.files import write_json
from megabatch.model.registry import build_model
from megabatch.model.weights import weights_bytes
from megabatch.use.classifier import load, predict
from megabatch.use.evaluate import evaluate_run
from tests.use.test_classifier import CLASSES, make_model, make_set


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has finished, on the class folders `photos` beside it."""
    root = make_set(tmp_path / "photos", size=(40, 48))  # one size: they lie in memory
    config, _ = make_model(tmp_path / "run", root)
    settings = config.model_dump(mode="json")
    settings["data"]["num_classes"] = 3
    (tmp_path / "run" / "config.toml").write_text(type(config).model_validate(settings).to_toml())
    write_json(tmp_path / "run" / "summary.json", {"status": "finished"})
    return tmp_path / "run"


def test_classes_are_found_by_name(run: Path) -> None:
    other = run.parent / "other"
    shutil.copytree(run.parent / "photos", other)
    shutil.rmtree(other / "ant")
    (other / "bee").rename(other / "zz")  # the folders' order is another one then
    (other / "wasp").rename(other / "bee")
    (other / "zz").rename(other / "wasp")
    source = FolderImages(other, "val")
    found = list(predict(load(run), [Path(source.name_of(index)) for index in range(len(source))]))
    told = [CLASSES[int(one.logits.argmax())] for one in found if one.logits is not None]
    hits = sum(one == source.class_names[label] for one, label in zip(told, source.labels, strict=True))
    for with_card in (True, False):  # without a card the run's own images know the names
        if not with_card:
            (run / "model.json").unlink()
        result = evaluate_run(run, other)
        assert result is not None
        assert (result["num_images"], result["top1"]) == (len(source), pytest.approx(hits / len(source)))


def test_classes_that_the_model_does_not_know_are_refused(run: Path) -> None:
    (run.parent / "photos" / "bee").rename(run.parent / "photos" / "zebra")
    with pytest.raises(DataError, match="photos val has 'zebra', which the model does not know; it knows 'ant', 'bee'"):
        evaluate_run(run, run.parent / "photos")


def test_weights_of_another_network_are_named(run: Path) -> None:
    (run / "model.safetensors").write_bytes(weights_bytes(build_model("resnet18", num_classes=3, in_channels=3)))
    with pytest.raises(CheckpointError, match=r"holds another model.* restore config.toml and the weights of one"):
        evaluate_run(run, None)


def test_mistakes_name_the_files_of_a_small_set(run: Path) -> None:
    evaluate_run(run, None)
    rows = list(csv.DictReader((run / "mistakes.csv").read_text().splitlines()))
    assert rows
    assert all(Path(row["image"]).is_file() for row in rows)
