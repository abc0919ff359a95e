"""A trained model in formats that others read: ONNX, `torch.export`, and a folder for timm and Hugging Face.

ONNX and torch hold the whole classifier: uint8 images [n, height, width, channels] in, logits out, normalised within.
timm gets the weights in its own names and a `config.json`; it scales and normalises by that file, and transformers'
TimmWrapper does the same. Each is compared with the model on the given images before it is put into place, the folders
where timm is installed.
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from megabatch.errors import CheckpointError, ConfigError, first_line
from megabatch.files import write_atomically, write_json
from megabatch.model.pretrained import head_of
from megabatch.use.classifier import Classifier

Target = Literal["onnx", "torch", "timm", "huggingface"]
FILES = {"onnx": "model.onnx", "torch": "model.pt2", "timm": "timm", "huggingface": "huggingface"}
LARGEST_DIFFERENCE = 1e-3
"""Of a logit: other libraries add in other orders, and fp32 has seven digits. A wrong graph differs by far more."""


def export(classifier: Classifier, target: Target, place: Path, images: Tensor) -> float | None:
    """Write the model to `place`; returns the largest difference of a logit on `images`.

    None: it could not be compared, because timm cannot be imported here.

    images: uint8 [n, height, width, channels], what the result is compared on.

    Raises:
        ConfigError: the format's package is not installed, or it cannot hold this model.
        CheckpointError: the result does not agree with the model; nothing is written.
    """
    write = {"onnx": _to_onnx, "torch": _to_torch, "timm": _to_timm, "huggingface": _to_huggingface}[target]
    with torch.no_grad():
        return write(classifier, place, images, classifier(images))


def some_images(classifier: Classifier) -> Tensor:
    """Eight images of random pixels, for who has no image at hand."""
    size, channels = classifier.card.image_size, classifier.card.channels
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (8, size, size, channels), generator=generator, dtype=torch.uint8)


def _to_onnx(classifier: Classifier, place: Path, images: Tensor, wanted: Tensor) -> float:
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--to onnx needs {error.name}, which is not installed; pip install 'megabatch[onnx]'"
        ) from None
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says about its own exporter is nothing a user can act on
        logger.setLevel(logging.ERROR)
        program = torch.onnx.export(
            classifier,
            (_two(images),),
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim("n")},),
            dynamo=True,
            verbose=False,
        )
    logger.setLevel(level)
    assert program is not None
    model = program.model_proto
    onnx.helper.set_model_props(model, {"megabatch": json.dumps(classifier.card.model_dump(mode="json"))})
    content = model.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    [logits] = session.run(["logits"], {"images": images.numpy()})
    difference = _difference(wanted, torch.from_numpy(np.array(logits)), "onnxruntime")
    write_atomically(place, content)
    return difference


def _to_torch(classifier: Classifier, place: Path, images: Tensor, wanted: Tensor) -> float:
    program = torch.export.export(classifier, (_two(images),), dynamic_shapes=({0: torch.export.Dim("n")},))
    difference = _difference(wanted, program.module()(images), "torch.export")
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(program, out)
    write_atomically(place, out.getvalue())
    return difference


def _to_timm(classifier: Classifier, place: Path, images: Tensor, wanted: Tensor) -> float | None:
    card, network = classifier.card, classifier.network
    architecture = card.model.removeprefix("timm:")
    if ":" in architecture or architecture in ("resnet8", "resnet20", "resnet44"):
        raise ConfigError(f"timm has no network '{card.model}'; export to onnx or torch instead")
    if len(card.mean) != card.channels:
        raise ConfigError(f"timm wants a mean for each of {card.channels} channels, the model has one; export to onnx")
    scaled_side = round(card.image_size * 8 / 7)
    settings: dict[str, Any] = {
        "input_size": [card.channels, card.image_size, card.image_size],
        "mean": list(card.mean),
        "std": list(card.std),
        "crop_pct": card.image_size / (scaled_side + 0.5),  # timm rounds the quotient down
        "interpolation": "bilinear",
        "num_classes": len(card.class_names),
        "label_names": list(card.class_names),
    }
    table = {
        "architecture": architecture,
        "num_classes": len(card.class_names),
        "num_features": head_of(network, len(card.class_names)).in_features,
        "label_names": list(card.class_names),
        "model_args": {"in_chans": card.channels},
        "pretrained_cfg": settings,
    }
    state = {name: value.contiguous().clone() for name, value in network.state_dict().items()}
    if card.precision != "fp32":  # timm computes as its user says, by default so
        wanted = Classifier(network, card.model_copy(update={"precision": "fp32"}))(images)
    logits = _timms_logits(table, state, images)
    difference = None if logits is None else _difference(wanted, logits, "timm")
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"'{place}' cannot be made: {error.strerror}; choose another --output") from None
    write_atomically(place / "model.safetensors", safetensors_bytes(state, metadata={"format": "pt"}))
    write_json(place / "config.json", table)
    return difference


def _to_huggingface(classifier: Classifier, place: Path, images: Tensor, wanted: Tensor) -> float | None:
    """timm's folder, which transformers reads too, with the page that the hub shows."""
    difference = _to_timm(classifier, place, images, wanted)
    card = classifier.card
    name = card.model.removeprefix("timm:")
    accuracy = "" if card.top1 is None else f" Top-1 accuracy {card.top1:.2%} on {card.val_images:,} validation images."
    write_atomically(
        place / "README.md",
        f"""---
library_name: timm
pipeline_tag: image-classification
tags: [image-classification, timm, transformers]
---
{name} for {len(card.class_names)} classes at {card.image_size} px, trained with megabatch.{accuracy}

```python
from transformers import AutoImageProcessor, AutoModelForImageClassification  # or timm.create_model("hf-hub:ORG/NAME")

processor = AutoImageProcessor.from_pretrained("ORG/NAME")
model = AutoModelForImageClassification.from_pretrained("ORG/NAME")
```
""",
    )
    return difference


def _timms_logits(table: dict[str, Any], state: dict[str, Tensor], images: Tensor) -> Tensor | None:
    """What timm's own network makes of the images; None where timm, or the torchvision it needs, cannot be imported."""
    try:
        import timm
    except Exception:  # a torchvision of another torch raises RuntimeError
        return None
    try:
        network = timm.create_model(table["architecture"], num_classes=table["num_classes"], **table["model_args"])
        network.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointError(
            f"timm's {table['architecture']} is another network ({first_line(error)}); export to onnx"
        ) from None
    settings = table["pretrained_cfg"]
    mean, std = (torch.tensor(settings[name]) for name in ("mean", "std"))
    logits: Tensor = network.eval()(((images / 255.0 - mean) / std).permute(0, 3, 1, 2))
    return logits.float()


def _two(images: Tensor) -> Tensor:
    """An example with two images: torch.export takes a batch of one for a constant."""
    return images[:1].repeat(2, 1, 1, 1)


def _difference(wanted: Tensor, found: Tensor, library: str) -> float:
    difference = float((wanted - found).abs().max())
    if not difference <= LARGEST_DIFFERENCE * max(1.0, float(wanted.abs().max())):
        raise CheckpointError(
            f"{library} gives logits that differ by {difference:.3g} from the model's; nothing was written, "
            "export to another format"
        )
    return difference
