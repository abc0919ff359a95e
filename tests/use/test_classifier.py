"""What `predict` says of a set is what `evaluate` counts on it, image by image."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import megabatch
from megabatch.config import Config
from megabatch.data.batches import assemble_evaluation
from megabatch.data.folder import FolderImages
from megabatch.errors import CheckpointError, DataError
from megabatch.model.normaliser import normaliser_of
from megabatch.model.registry import build_model
from megabatch.model.weights import weights_bytes
from megabatch.recipes import load_config
from megabatch.train.card import card_of, write_model
from megabatch.train.evaluate import evaluate
from megabatch.use.classifier import Classifier, fitted_images, image_files, load, predict
from tests.data.images import encoded, photograph, turned

CLASSES = ("ant", "bee", "wasp")


def make_set(root: Path, per_class: int = 9, *, size: tuple[int, int] | None = None) -> Path:
    """Class folders of JPEGs, of one size or of many."""
    for label, name in enumerate(CLASSES):
        (root / name).mkdir(parents=True)
        for number in range(per_class):
            pixels = photograph(*(size or (40 + number, 33 + 3 * number)), seed=10 * label + number)
            (root / name / f"{number}.jpg").write_bytes(encoded(pixels))
    return root


def make_model(folder: Path, root: Path) -> tuple[Config, nn.Module]:
    """A network with uneven weights and statistics, saved as a run saves it."""
    overrides = ["data.image_size=32", "model.name=resnet8", "model.width=8", "train.evaluation_batch_size=4"]
    config = load_config("photos", [*overrides, f"data.path={root}", "data.mean=[0.4, 0.5, 0.6]"])
    torch.manual_seed(3)
    network = build_model("resnet8", num_classes=3, in_channels=3, width=8, zero_gamma="none")
    for value in network.state_dict().values():
        if value.is_floating_point():
            value.add_(0.1 * torch.rand_like(value))
    folder.mkdir(exist_ok=True)
    card = card_of(config, FolderImages(root, "val"), None)
    write_model(folder, network, card)
    memory_format = torch.channels_last
    return config, network.eval().to(memory_format=memory_format)  # type: ignore[call-overload]


def test_predict_is_what_evaluate_counts(tmp_path: Path) -> None:
    root = make_set(tmp_path / "photos")
    config, network = make_model(tmp_path / "run", root)
    source = FolderImages(root, "val")
    normalise = normaliser_of(config, 3, torch.device("cpu"))
    files = [Path(source.name_of(index)) for index in range(len(source))]
    found = list(predict(load(tmp_path / "run"), files))
    assert [one.file for one in found] == files
    logits = torch.stack([one.logits for one in found if one.logits is not None])
    for first in range(0, len(files), 4):  # the batches of the evaluation
        indices = np.arange(first, min(first + 4, len(files)))
        images, _ = assemble_evaluation(source, 32, indices)
        with torch.no_grad():
            assert torch.equal(logits[indices], network(normalise(torch.from_numpy(images))))
    [counted] = evaluate([network], source, config, normalise)
    labels = torch.from_numpy(source.labels)
    assert counted.top1 == (logits.argmax(1) == labels).double().mean().item()
    assert len({tuple(row.tolist()) for row in logits}) == len(files)  # a network that sees nothing would agree too


def test_load_gives_a_module_with_classes_and_preprocessing(tmp_path: Path) -> None:
    root = make_set(tmp_path / "photos")
    make_model(tmp_path / "run", root)
    model = megabatch.load(tmp_path / "run")
    assert isinstance(model, Classifier)
    assert model.class_names == CLASSES
    file = root / "bee" / "3.jpg"
    with Image.open(file) as image, torch.no_grad():
        mine = model(model.preprocess(image))[0]
    [theirs] = predict(model, [file])
    assert theirs.logits is not None
    assert torch.allclose(mine, theirs.logits, atol=1e-6)
    with pytest.raises(DataError, match="1 channels of type uint8 was given, the model needs 3"):
        model.preprocess(np.zeros((9, 9), dtype=np.uint8))


def kinds_of_image() -> dict[str, tuple[str, bytes]]:
    """By name: the file's suffix and its bytes."""
    pixels = photograph(50, 70)
    photo, grey = Image.fromarray(pixels), Image.fromarray(pixels[:, :, 0])
    deep = Image.fromarray(pixels[:, :, 0].astype(np.uint16) * 257)
    alpha = photo.copy()
    alpha.putalpha(grey)
    return {
        "rgb": ("jpg", encoded(photo)),
        "turned": ("jpg", turned(pixels, 6)),
        "mirrored and turned": ("jpg", turned(pixels, 5)),
        "cmyk": ("jpg", encoded(photo.convert("CMYK"))),
        "grey": ("jpg", encoded(grey)),
        "16 bits": ("png", encoded(deep, "PNG")),
        "alpha": ("png", encoded(alpha, "PNG")),
        "palette": ("png", encoded(photo.quantize(16), "PNG")),
    }


@pytest.mark.parametrize("kind", kinds_of_image())
def test_an_image_of_pillow_is_seen_as_its_file_is(tmp_path: Path, kind: str) -> None:
    make_model(tmp_path / "run", make_set(tmp_path / "photos"))
    model = load(tmp_path / "run")
    suffix, content = kinds_of_image()[kind]
    file = tmp_path / f"image.{suffix}"
    file.write_bytes(content)
    with Image.open(file) as image:
        mine = model.preprocess(image)
    assert torch.equal(mine, fitted_images(model, [file]))
    [theirs] = predict(model, [file])
    assert theirs.logits is not None
    with torch.no_grad():
        assert torch.allclose(model(mine)[0], theirs.logits, atol=1e-6)


def test_a_file_that_cannot_be_read_does_not_stop_the_others(tmp_path: Path) -> None:
    root = make_set(tmp_path / "photos")
    make_model(tmp_path / "run", root)
    bad, good = tmp_path / "bad.jpg", root / "ant" / "1.jpg"
    bad.write_bytes(b"no header")
    huge = tmp_path / "huge.png"
    Image.new("1", (10_000, 10_000)).save(huge)
    broken, fine, large = predict(load(tmp_path / "run"), [bad, good, huge])
    assert broken.logits is None
    assert "bad.jpg" in broken.problem
    assert "huge.png" in large.problem
    assert "pixels" in large.problem
    [alone] = predict(load(tmp_path / "run"), [good])
    assert fine.logits is not None
    assert alone.logits is not None
    assert torch.allclose(fine.logits, alone.logits, atol=1e-5)


def test_files_and_folders(tmp_path: Path) -> None:
    root = make_set(tmp_path / "photos", per_class=2)
    (root / "ant" / "notes.txt").write_text("x")
    assert [f.name for f in image_files([root / "bee" / "1.jpg", root / "ant"])] == ["1.jpg", "0.jpg", "1.jpg"]
    with pytest.raises(DataError, match=r"nowhere does not exist; give files, or folders of images"):
        image_files([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty has no images"):
        image_files([tmp_path / "empty"])


def test_a_model_of_another_architecture_and_a_folder_without_one(tmp_path: Path) -> None:
    root = make_set(tmp_path / "photos")
    make_model(tmp_path / "run", root)
    other = build_model("resnet18", num_classes=3, in_channels=3)
    (tmp_path / "run" / "model.safetensors").write_bytes(weights_bytes(other))
    with pytest.raises(CheckpointError, match=r"holds another model.* of one and the same run"):
        load(tmp_path / "run")
    with pytest.raises(CheckpointError, match="give the folder of a run that has finished"):
        load(tmp_path)
