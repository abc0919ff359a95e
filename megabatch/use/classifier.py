"""`megabatch.load(RUN)`: a trained model as a module that knows its classes and its preprocessing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from megabatch.data.batches import Broken, BrokenLog, LoaderSettings, assemble_evaluation, evaluation_batches, fit
from megabatch.data.decode import decoded_pixels
from megabatch.data.folder import EXTENSIONS
from megabatch.data.jpeg import Pixels
from megabatch.data.sources import EncodedImages
from megabatch.errors import DataError
from megabatch.files import read_bytes
from megabatch.machine import usable_cores
from megabatch.model.normaliser import Normaliser
from megabatch.model.registry import build_model
from megabatch.model.weights import read_weights
from megabatch.train.card import CARD_FILE, WEIGHTS_FILE, ModelCard, read_card
from megabatch.train.checkpoint import check_fits
from megabatch.train.components import DTYPES

__all__ = ["Classifier", "fitted_images", "image_files", "load", "predict"]

_MAX_IMAGE_BYTES = 2**30


class Classifier(nn.Module):
    """Logits of images: uint8 [n, height, width, channels] of the card's image size, as `preprocess` makes them."""

    def __init__(self, network: nn.Module, card: ModelCard) -> None:
        super().__init__()
        self.network, self.card = network, card
        self.normalise = Normaliser(card.mean, card.std, channels_last=card.channels_last)

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.card.class_names

    def forward(self, images: Tensor) -> Tensor:
        batch = self.normalise(images)
        dtype = DTYPES[self.card.precision]
        with torch.autocast(batch.device.type, dtype=dtype) if dtype else nullcontext():
            logits: Tensor = self.network(batch)
        return logits.float()

    def preprocess(self, image: Image.Image | Pixels) -> Tensor:
        """One image, of Pillow or as an array [height, width, channels], as [1, size, size, channels].

        An image of Pillow becomes what `predict` makes of its file: upright, in the model's channels.
        """
        if isinstance(image, Image.Image):
            image = decoded_pixels(image, self.card.channels)
        pixels = image.reshape(*image.shape[:2], -1)
        if pixels.dtype != np.uint8 or pixels.shape[2] != self.card.channels:
            raise DataError(
                f"an image of {pixels.shape[2]} channels of type {pixels.dtype} was given, the model needs "
                f"{self.card.channels} of type uint8; convert it"
            )
        return torch.from_numpy(np.array(fit(pixels, self.card.image_size)))[None]


def load(run: str | Path) -> Classifier:
    """The model of a finished run, ready to classify; no code is read from the folder, only tensors and plain values.

    Raises:
        CheckpointError: no model there, or one that does not fit its card.
    """
    folder = Path(run)
    card = read_card(folder)
    network = build_model(
        card.model,
        num_classes=len(card.class_names),
        in_channels=card.channels,
        zero_gamma="none",  # the weights are about to be replaced
        width=card.width,
    )
    state = read_weights(folder / WEIGHTS_FILE)
    advice = f"restore {WEIGHTS_FILE} and {CARD_FILE} of one and the same run"
    check_fits({"model": state}, network.state_dict(), f"'{folder / WEIGHTS_FILE}'", advice)
    network.load_state_dict(state)
    memory_format = torch.channels_last if card.channels_last else torch.contiguous_format
    network = network.to(memory_format=memory_format)  # type: ignore[call-overload]
    return Classifier(network, card).eval()


class ImageFiles(EncodedImages):
    """Files somewhere on disk, as a source without known labels."""

    def __init__(self, files: Sequence[Path], channels: int) -> None:
        self.name, self.channels, self.num_classes = "the given images", channels, 1
        self.labels = np.zeros(len(files), dtype=np.int64)
        self._files = files

    def name_of(self, index: int) -> str:
        return str(self._files[index])

    def read_bytes(self, index: int) -> bytes:
        try:
            return read_bytes(self._files[index], _MAX_IMAGE_BYTES)
        except OSError as error:
            raise DataError(f"cannot read the image {self._files[index]}: {error.strerror}; check the path") from error


def image_files(paths: Sequence[Path]) -> list[Path]:
    """The given files, and all images below the given folders, sorted by name within each.

    Raises:
        DataError: a path that is not there, or a folder without images.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise DataError(f"the image {path} does not exist; give files, or folders of images")
        inside = [p for p in path.rglob("*") if p.suffix.lower() in EXTENSIONS] if path.is_dir() else [path]
        if not inside:
            raise DataError(f"{path} has no images ({', '.join(EXTENSIONS)}); give files, or folders of images")
        found += sorted(inside)
    return found


@dataclass(frozen=True)
class Prediction:
    """One image: its logits, or the reason why it cannot be read."""

    file: Path
    logits: Tensor | None
    problem: str = ""


@torch.no_grad()
def predict(classifier: Classifier, files: Sequence[Path]) -> Iterator[Prediction]:
    """Logits of every file, in order: read, fitted and passed in batches as `evaluate` does it.

    A file that cannot be read gives its problem; it takes no part in the others' result.
    """
    source = ImageFiles(files, classifier.card.channels)
    problems: dict[int, str] = {}
    log = _Problems(problems)
    feeding = LoaderSettings(threads=min(16, usable_cores()), broken=log)
    size, step = classifier.card.image_size, classifier.card.batch_size
    batches = evaluation_batches(source, size, 0, len(files), step, feeding)
    for first, (images, _) in zip(range(0, len(files), step), batches, strict=True):
        logits = classifier(torch.from_numpy(images)).cpu()
        for index in range(first, min(first + step, len(files))):
            problem = problems.get(index, "")
            yield Prediction(files[index], None if problem else logits[index - first], problem)


class _Problems(BrokenLog):
    """Notes why files cannot be read, and stops for none."""

    def __init__(self, problems: dict[int, str]) -> None:
        super().__init__(1.0)
        self._problems = problems

    def note(self, num_read: int, broken: list[Broken]) -> None:
        self._problems.update({one.index: one.reason for one in broken})


def fitted_images(classifier: Classifier, files: Sequence[Path]) -> Tensor:
    """The files as one batch for the classifier; DataError for one that cannot be read."""
    source = ImageFiles(files, classifier.card.channels)
    images, _ = assemble_evaluation(source, classifier.card.image_size, np.arange(len(files)))
    return torch.from_numpy(images)
