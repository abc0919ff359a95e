"""An exported model gives the model's logits; a format that cannot hold it refuses."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from benchmarks.import_timm import import_timm
from megabatch.errors import CheckpointError, ConfigError
from megabatch.model.registry import build_model
from megabatch.train.card import ModelCard
from megabatch.use.classifier import Classifier
from megabatch.use.export import export, some_images
from tests.data.images import photograph


def classifier(name: str = "resnet8", size: int = 32) -> Classifier:
    torch.manual_seed(1)
    network = build_model(name, num_classes=3, in_channels=3, zero_gamma="none")
    card = ModelCard(
        model=name,
        class_names=("a", "b", "c"),
        channels=3,
        image_size=size,
        mean=(0.4, 0.5, 0.6),
        std=(0.2, 0.2, 0.3),
        precision="fp32",
        channels_last=True,
        batch_size=4,
        recipe_digest="x",
    )
    return Classifier(network, card).eval()


@pytest.mark.filterwarnings("ignore")
def test_onnx_agrees_for_any_number_of_images(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="the extra [onnx] is not installed")
    import onnxruntime

    model, place = classifier(), tmp_path / "model.onnx"
    difference = export(model, "onnx", place, some_images(model))
    assert difference is not None
    assert difference < 1e-4
    session = onnxruntime.InferenceSession(place.read_bytes(), providers=["CPUExecutionProvider"])
    kept = json.loads(session.get_modelmeta().custom_metadata_map["megabatch"])
    assert kept["class_names"] == ["a", "b", "c"]
    for count in (1, 5):
        images = some_images(model)[:count]
        [logits] = session.run(None, {"images": images.numpy()})
        with torch.no_grad():
            assert torch.allclose(torch.from_numpy(logits), model(images), atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_torch_agrees(tmp_path: Path) -> None:
    model, place = classifier(), tmp_path / "model.pt2"
    export(model, "torch", place, some_images(model))
    program = torch.export.load(io.BytesIO(place.read_bytes()))
    images = some_images(model)[:3]
    with torch.no_grad():
        assert torch.allclose(program.module()(images), model(images), atol=1e-5)


@pytest.fixture(scope="session")
def timm() -> Any:
    """timm needs torchvision, which has no build for every torch; it may be broken in more ways than missing."""
    try:
        return import_timm()
    except Exception as error:
        pytest.skip(f"timm cannot be imported: {error}")


def photograph_and_model(size: int, name: str = "resnet18") -> tuple[Image.Image, Classifier]:
    return Image.fromarray(photograph(400, 300)), classifier(name, size)


def test_the_folder_for_timm_holds_weights_names_and_preprocessing(tmp_path: Path) -> None:
    model = classifier("resnet18", 160)
    difference = export(model, "timm", tmp_path / "timm", some_images(model))
    assert difference is None or difference < 1e-4
    config = json.loads((tmp_path / "timm" / "config.json").read_text())
    assert (config["architecture"], config["num_features"], config["label_names"]) == ("resnet18", 512, ["a", "b", "c"])
    # timm scales the shorter side to the whole part of this; 183 is 8/7 of 160, rounded.
    assert math.floor(160 / config["pretrained_cfg"]["crop_pct"]) == 183
    weights = load_file(tmp_path / "timm" / "model.safetensors")
    assert weights.keys() == model.network.state_dict().keys()


# At other sizes timm may cut the centre one pixel beside ours: it rounds half of an odd rest to an even number.
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
@pytest.mark.parametrize("size", [64, 224])
@pytest.mark.filterwarnings("ignore")
def test_timm_loads_the_folder(timm: Any, tmp_path: Path, name: str, size: int) -> None:
    photo, model = photograph_and_model(size, name)
    assert export(model, "timm", tmp_path / "timm", some_images(model)) is not None
    theirs = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    assert theirs.pretrained_cfg["label_names"] == ["a", "b", "c"]
    prepare = timm.data.create_transform(**timm.data.resolve_model_data_config(theirs), is_training=False)
    with torch.no_grad():
        difference = (theirs(prepare(photo)[None]) - model(model.preprocess(photo))).abs().max()
    print(f"timm, {name} at {size} px: logits differ by {difference:.2g} at most")
    assert difference < 1e-4


@pytest.mark.usefixtures("timm")
@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_the_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)
    photo, model = photograph_and_model(224)
    export(model, "huggingface", tmp_path / "hub", some_images(model))
    theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "hub").eval()
    assert theirs.config.id2label == {0: "a", 1: "b", 2: "c"}
    pixels = transformers.AutoImageProcessor.from_pretrained(tmp_path / "hub")(photo)["pixel_values"]
    with torch.no_grad():
        difference = (theirs(pixel_values=pixels).logits - model(model.preprocess(photo))).abs().max()
    print(f"transformers: logits differ by {difference:.2g} at most")
    assert difference < 1e-4


def test_the_page_for_the_hub_says_what_the_model_is(tmp_path: Path) -> None:
    model = classifier("resnet18", 64)
    model.card = model.card.model_copy(update={"top1": 0.875, "val_images": 1200})
    export(model, "huggingface", tmp_path / "hub", some_images(model))
    page = (tmp_path / "hub" / "README.md").read_text()
    assert page.startswith("---\nlibrary_name: timm\npipeline_tag: image-classification\n")
    assert "resnet18 for 3 classes at 64 px" in page
    assert "Top-1 accuracy 87.50% on 1,200 validation images" in page
    assert {file.name for file in (tmp_path / "hub").iterdir()} == {"README.md", "config.json", "model.safetensors"}


def test_what_a_format_cannot_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = classifier()
    with pytest.raises(ConfigError, match="timm has no network 'resnet8'; export to onnx or torch"):
        export(model, "timm", tmp_path / "timm", some_images(model))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"--to onnx needs onnxruntime, .*pip install 'megabatch\[onnx\]'"):
        export(model, "onnx", tmp_path / "model.onnx", some_images(model))


def test_a_result_that_differs_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = classifier()
    monkeypatch.setattr("megabatch.use.export.LARGEST_DIFFERENCE", -1.0)
    with pytest.raises(CheckpointError, match="nothing was written"):
        export(model, "torch", tmp_path / "model.pt2", some_images(model))
    assert not (tmp_path / "model.pt2").exists()
